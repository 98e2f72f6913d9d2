// manifests builds each combination of k8s/combinations.txt, and writes it to a folder as YAML, one file a combination.
//
// Every object is decoded strictly into its Go type: an unknown, misspelt or doubled field, or a value of the wrong kind,
// is an error, and so is a kind that isn't known here, unless it belongs to an operator named in notChecked.
//
//	manifests K8S_FOLDER OUT_FOLDER
//
// Exit status: 0, or 1 with one line for each thing that is wrong.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	keda "github.com/kedacore/keda/v2/apis/keda/v1alpha1"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

const combinationsFile = "combinations.txt"

// notChecked are groups of operators whose Go types aren't had here: their objects are examples.
var notChecked = map[string]bool{"kafka.strimzi.io": true, "k8ssandra.io": true, "valkey.io": true}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: manifests K8S_FOLDER OUT_FOLDER")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(source, out string) error {
	files, err := inMemory(source)
	if err != nil {
		return err
	}
	list, err := os.ReadFile(filepath.Join(source, combinationsFile))
	if err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(out), os.MkdirAll(out, 0o755)); err != nil {
		return err
	}
	decode, err := strictDecoder()
	if err != nil {
		return err
	}
	var wrong []error
	for line := range strings.Lines(string(list)) {
		line, _, _ = strings.Cut(line, "#")
		parts := strings.Fields(line)
		if len(parts) == 0 {
			continue
		}
		name := strings.ReplaceAll(strings.Join(parts, "+"), "/", "-")
		objects, err := build(files, parts)
		if err != nil {
			wrong = append(wrong, fmt.Errorf("%s: %w", name, err))
			continue
		}
		for _, object := range objects {
			if err := decode(object); err != nil {
				wrong = append(wrong, fmt.Errorf("%s: %w", name, err))
			}
		}
		text := bytes.Join(objects, []byte("---\n"))
		wrong = append(wrong, os.WriteFile(filepath.Join(out, name+".yaml"), text, 0o644))
	}
	return errors.Join(wrong...)
}

// inMemory copies the folder, so that combinations can be put beside what they are made of.
func inMemory(source string) (filesys.FileSystem, error) {
	files := filesys.MakeFsInMemory()
	return files, filepath.WalkDir(source, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		within, err := filepath.Rel(source, path)
		if err != nil {
			return err
		}
		return files.WriteFile("/k8s/"+within, text)
	})
}

// build gives the objects of a base or an overlay (the first part) with components (the others), one YAML each.
func build(files filesys.FileSystem, parts []string) ([][]byte, error) {
	var text strings.Builder
	fmt.Fprintf(&text, "resources: [../%s]\n", parts[0])
	if len(parts) > 1 {
		text.WriteString("components:\n")
	}
	for _, component := range parts[1:] {
		fmt.Fprintf(&text, "- ../components/%s\n", component)
	}
	if err := files.WriteFile("/k8s/combination/kustomization.yaml", []byte(text.String())); err != nil {
		return nil, err
	}
	made, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(files, "/k8s/combination")
	if err != nil {
		return nil, err
	}
	var objects [][]byte
	for _, object := range made.Resources() {
		text, err := object.AsYAML()
		if err != nil {
			return nil, err
		}
		objects = append(objects, text)
	}
	return objects, nil
}

func strictDecoder() (func([]byte) error, error) {
	known := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		scheme.AddToScheme, keda.AddToScheme, monitoring.AddToScheme,
	} {
		if err := add(known); err != nil {
			return nil, err
		}
	}
	decoder := serializer.NewCodecFactory(known, serializer.EnableStrict).UniversalDeserializer()
	return func(text []byte) error {
		var kind struct {
			APIVersion string `json:"apiVersion"`
			Kind       string `json:"kind"`
			Metadata   struct {
				Name string `json:"name"`
			} `json:"metadata"`
		}
		if err := yaml.Unmarshal(text, &kind); err != nil {
			return err
		}
		group, err := schema.ParseGroupVersion(kind.APIVersion)
		if err != nil {
			return err
		}
		if notChecked[group.Group] {
			return nil
		}
		if _, _, err := decoder.Decode(text, nil, nil); err != nil && err != io.EOF {
			return fmt.Errorf("%s %s: %w", kind.Kind, kind.Metadata.Name, err)
		}
		return nil
	}, nil
}
