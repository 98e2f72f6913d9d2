package main

import (
	"net/http"
	"slices"
	"strings"

	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// route is one way to an RPC, as the protos say it.
type route struct {
	method   string
	template string // "/api/v1/tweets/{tweet_id}"
	segments []string
	rpc      protoreflect.MethodDescriptor
	body     string // "": takes none; "*": the whole message; else one field of it
}

// routes are all of them; of two that fit, the one whose literal segment comes first is tried first.
type routes []route

const (
	apiPrefix  = "/api/v1/"
	mePath     = "/api/v1/me"
	streamPath = "/api/v1/timeline/home/stream"
)

// annotatedRoutes reads the HTTP annotations of all services that are compiled in.
func annotatedRoutes() routes {
	var found routes
	protoregistry.GlobalFiles.RangeFiles(func(file protoreflect.FileDescriptor) bool {
		for i := range file.Services().Len() {
			methods := file.Services().Get(i).Methods()
			for j := range methods.Len() {
				found = append(found, routesOf(methods.Get(j))...)
			}
		}
		return true
	})
	slices.SortStableFunc(found, func(a, b route) int { return strings.Compare(a.shape(), b.shape()) })
	return found
}

func routesOf(rpc protoreflect.MethodDescriptor) []route {
	rule, ok := proto.GetExtension(rpc.Options(), annotations.E_Http).(*annotations.HttpRule)
	if !ok || rule == nil {
		return nil
	}
	var found []route
	for _, one := range append([]*annotations.HttpRule{rule}, rule.GetAdditionalBindings()...) {
		method, template := "", ""
		switch pattern := one.GetPattern().(type) {
		case *annotations.HttpRule_Get:
			method, template = http.MethodGet, pattern.Get
		case *annotations.HttpRule_Post:
			method, template = http.MethodPost, pattern.Post
		case *annotations.HttpRule_Patch:
			method, template = http.MethodPatch, pattern.Patch
		case *annotations.HttpRule_Delete:
			method, template = http.MethodDelete, pattern.Delete
		default:
			panic("an HTTP method that the edge doesn't know: " + string(rpc.FullName()))
		}
		found = append(found, route{method, template, strings.Split(template, "/"), rpc, one.GetBody()})
	}
	return found
}

// shape has a letter for each segment: l for a literal, v for a variable.
func (r *route) shape() string {
	var out strings.Builder
	for _, segment := range r.segments {
		out.WriteByte("lv"[strings.Count(segment, "{")])
	}
	return out.String()
}

// variables gives the path's variables by their proto paths, if it is this route's.
func (r *route) variables(parts []string) (map[string]string, bool) {
	if len(parts) != len(r.segments) {
		return nil, false
	}
	var found map[string]string
	for i, segment := range r.segments {
		name, isVariable := strings.CutPrefix(segment, "{")
		switch {
		case isVariable && parts[i] != "":
			if found == nil {
				found = map[string]string{}
			}
			found[strings.TrimSuffix(name, "}")] = parts[i]
		case segment != parts[i]:
			return nil, false
		}
	}
	return found, true
}

// find gives the route of a request. Without one: the methods that the path has, none for an unknown path.
func (rs routes) find(method, path string) (*route, map[string]string, []string) {
	parts := strings.Split(path, "/")
	var allowed []string
	for i := range rs {
		variables, matches := rs[i].variables(parts)
		if !matches {
			continue
		}
		if rs[i].method == method {
			return &rs[i], variables, nil
		}
		if !slices.Contains(allowed, rs[i].method) {
			allowed = append(allowed, rs[i].method)
		}
	}
	return nil, nil, allowed
}

// field finds a field of a message by its proto path, such as "tweet.text"; nil if there is none.
func field(message protoreflect.MessageDescriptor, path string) protoreflect.FieldDescriptor {
	var found protoreflect.FieldDescriptor
	for name := range strings.SplitSeq(path, ".") {
		if message == nil {
			return nil
		}
		found = message.Fields().ByName(protoreflect.Name(name))
		if found == nil {
			return nil
		}
		message = found.Message()
	}
	return found
}

// jsonName gives a field as clients of this route know it: "page_size" is "limit", and "tweet.text" is "text" where the
// body is the tweet. What is no field stays as it is.
func (r *route) jsonName(path string) string {
	if r.body != "" && r.body != "*" {
		if path == r.body {
			return ""
		}
		if rest, inside := strings.CutPrefix(path, r.body+"."); inside {
			if found := field(r.rpc.Input().Fields().ByName(protoreflect.Name(r.body)).Message(), rest); found != nil {
				return found.JSONName()
			}
		}
	}
	name, index, indexed := strings.Cut(path, "[")
	if found := field(r.rpc.Input(), name); found != nil {
		name = found.JSONName()
		if indexed {
			name += "[" + index
		}
		return name
	}
	return path
}

// procedure is the RPC as gRPC names it.
func (r *route) procedure() string {
	return "/" + string(r.rpc.Parent().FullName()) + "/" + string(r.rpc.Name())
}
