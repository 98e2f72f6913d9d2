package main

import (
	"net/http"
	"os"
	"path"
	"strings"
)

// policy of what the page may load: only what the edge serves itself, and pictures of elsewhere.
const contentPolicy = "default-src 'self'; img-src 'self' data: https:; " +
	"frame-ancestors 'none'; base-uri 'none'; form-action 'self'"

// newStatic serves the files of a folder; "/ops" is "ops.html" or "ops/index.html". Nothing outside of it is reachable.
func newStatic(folder string) (http.Handler, error) {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return notThere{}, err
	}
	files := root.FS()
	server := http.FileServerFS(files)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			newProblem(http.StatusMethodNotAllowed, "METHOD_NOT_ALLOWED", "This path doesn't have this method.").send(w)
			return
		}
		name := strings.Trim(path.Clean(r.URL.Path), "/")
		served := ""
		for _, candidate := range []string{name, name + ".html", path.Join(name, "index.html")} {
			if candidate == "" {
				continue
			}
			if info, err := root.Stat(candidate); err == nil && !info.IsDir() {
				served = candidate
				break
			}
		}
		if served == "" {
			notThere{}.ServeHTTP(w, r)
			return
		}
		header := w.Header()
		header.Set("Content-Security-Policy", contentPolicy)
		header.Set("X-Content-Type-Options", "nosniff")
		header.Set("Referrer-Policy", "same-origin")
		header.Set("Cache-Control", "no-cache")
		if strings.HasSuffix(served, ".html") {
			http.ServeFileFS(w, withPath(r, "/"), files, served)
			return
		}
		server.ServeHTTP(w, withPath(r, "/"+served))
	}), nil
}

func withPath(r *http.Request, path string) *http.Request {
	other := r.Clone(r.Context())
	other.URL.Path, other.URL.RawPath = path, ""
	return other
}

type notThere struct{}

func (notThere) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	newProblem(http.StatusNotFound, "NO_SUCH_PATH", "There is nothing at this path.").send(w)
}
