package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/swaggest/swgui/v5/static"
	"github.com/vearutop/statigz"
	"google.golang.org/protobuf/reflect/protoreflect"
)

const (
	documentPath = "/openapi.json"
	viewerPath   = "/docs"
	idPattern    = "^[1-9][0-9]{0,18}$"
	viewerPage   = `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Starling's API</title>
<link rel="stylesheet" href="/docs/swagger-ui.css"><link rel="icon" href="/docs/favicon-32x32.png"></head>
<body><div id="viewer"></div><script src="/docs/swagger-ui-bundle.js"></script><script src="/docs/viewer.js"></script></body></html>
`
	viewerScript = `SwaggerUIBundle({url: "/openapi.json", dom_id: "#viewer", deepLinking: true, validatorUrl: null});
`
	// Swagger UI styles its elements one by one, and has its pictures inside of its style sheet.
	viewerPolicy = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
)

// What protoc-gen-openapiv2 makes of the protos and their comments: Swagger 2.0.
//
//go:embed gen/starling.swagger.json
var swagger []byte

type object = map[string]any

// narrowed says of fields what the protos say in words only. The formats are the tests' to fill in.
var narrowed = map[string]object{
	"CreateTweetRequest.text":                    {"minLength": 1, "format": "tweet-text"},
	"CreateTweetRequest.mediaIds":                {"maxItems": 4, "uniqueItems": true, "items": object{"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}},
	"CreateTweetRequest.requestId":               {"format": "uuid"},
	"Tweet.text":                                 {"minLength": 1, "format": "tweet-text"},
	"CreateUserRequest.handle":                   {"pattern": "^[A-Za-z0-9_]{1,15}$"},
	"CreateUserRequest.displayName":              {"format": "display-name"},
	"GetUserRequest.handle":                      {"pattern": "^[A-Za-z0-9_]{1,15}$"},
	"FanoutPolicy.pullThreshold":                 {"minimum": 2, "maximum": 1_000_000_000},
	"FanoutPolicy.pullThresholdMin":              {"minimum": 0, "maximum": 1_000_000_000},
	"ListHomeTimelineRequest.newerThanId":        {"pattern": "^(0|[1-9][0-9]{0,18})$"},
	"CreateTweetRequest.inReplyToTweetId":        {"minimum": 0},
	"CreateTweetRequest.quotedTweetId":           {"minimum": 0},
	"UpdateTweetRequest.updateMask":              {"enum": []string{"text"}},
	"UpdateFanoutPolicyRequest.updateMask":       {"pattern": "^(pullThreshold|pullThresholdMin)(,(pullThreshold|pullThresholdMin))?$"},
	"ListHomeTimelineRequest.readYourWriteToken": {"pattern": "^([1-9][0-9]{0,18})?$"},
	"UpdateTweetRequest.expectedVersion":         {"minimum": 0, "maximum": 1<<32 - 1},
}

// needed are the fields that a request can't do without, beside those in its path.
var needed = map[string][]string{
	"CreateTweetRequest":         {"text"},
	"CreateUserRequest":          {"handle"},
	"FollowRequest":              {"targetId"},
	"BlockRequest":               {"targetId"},
	"MuteRequest":                {"targetId"},
	"UpdateTweetRequest":         {"text"},
	"BatchGetTweetsRequest":      {"tweetIds"},
	"BatchGetEngagementsRequest": {"tweetIds"},
	"BatchGetUsersRequest":       {"userIds"},
}

// problems are an operation's own statuses, beside those that every one has.
var problemsOf = map[string][]int{
	"CreateTweet": {404, 409, 422}, "UpdateTweet": {404, 412}, "DeleteTweet": {404}, "GetTweet": {404}, "GetUser": {404},
	"ListTweetRevisions": {404}, "Retweet": {404}, "UndoRetweet": {404}, "Like": {404}, "Unlike": {404},
	"CreateUser": {409}, "Follow": {404, 409}, "Unfollow": {404, 409}, "Block": {404, 409}, "Unblock": {404, 409},
	"Mute": {404, 409}, "Unmute": {404, 409}, "ListUserTweets": {404}, "ListFollowers": {404}, "ListFollowing": {404},
}

var meanings = map[int]string{
	400: "Something in the request is wrong; `fields` names it.",
	401: "No token, or one that isn't valid.",
	403: "The caller may not do this.",
	404: "It is not there.",
	409: "Something that is there forbids it, or a request with this key is still running.",
	412: "The tweet is of another version.",
	413: "The body is too large.",
	415: "The body isn't JSON.",
	422: "The idempotency key was used with another body.",
	429: "Too many requests; `Retry-After` says when there may be more.",
	500: "Something went wrong here.",
	503: "Overloaded, or a service behind this one is away; `Retry-After` says when to try again.",
	504: "The deadline has passed.",
}

// document gives the OpenAPI 3.0 document: what is generated from the protos, with what the edge adds to it.
func document(all routes) []byte {
	var generated struct {
		Definitions object                       `json:"definitions"`
		Paths       map[string]map[string]object `json:"paths"`
	}
	if err := json.Unmarshal(swagger, &generated); err != nil {
		panic(err)
	}
	paths := object{}
	for i := range all {
		r := &all[i]
		path, old := r.paths()
		operation := operationOf(r, generated.Paths[old][strings.ToLower(r.method)])
		if paths[path] == nil {
			paths[path] = object{}
		}
		paths[path].(object)[strings.ToLower(r.method)] = operation
	}
	paths[mePath] = object{"get": meOperation(paths[apiPrefix+"users/{userId}"].(object)["get"].(object))}
	paths[streamPath] = object{"get": streamOperation()}
	schemas := schemasOf(generated.Definitions)
	text, err := json.Marshal(object{
		"openapi": "3.0.3",
		"info": object{
			"title": "Starling", "version": "1",
			"description": "Home timelines. 64-bit ids are strings in answers; requests may have them as numbers, too. Errors are " +
				"problem details (RFC 9457) with a stable `reason`. `Grpc-Timeout: 500m` gives a call a deadline of its own.",
		},
		"servers":  []object{{"url": "/"}},
		"security": []object{{"bearer": []string{}}},
		"paths":    paths,
		"components": object{
			"schemas":         schemas,
			"securitySchemes": object{"bearer": object{"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}},
			"responses":       problemResponses(),
		},
	})
	if err != nil {
		panic(err)
	}
	return append(bytes.ReplaceAll(text, []byte("#/definitions/"), []byte("#/components/schemas/")), '\n')
}

// paths gives a route's path as clients know it, and as the generator does, which has "{tweet.tweetId}".
func (r *route) paths() (string, string) {
	known, generated := slices.Clone(r.segments), slices.Clone(r.segments)
	for i, segment := range r.segments {
		if name, isVariable := strings.CutPrefix(segment, "{"); isVariable {
			name = strings.TrimSuffix(name, "}")
			known[i] = "{" + r.jsonName(name) + "}"
			before, _, nested := strings.Cut(name, ".")
			generated[i] = known[i]
			if nested {
				generated[i] = "{" + before + "." + r.jsonName(name) + "}"
			}
		}
	}
	return strings.Join(known, "/"), strings.Join(generated, "/")
}

func operationOf(r *route, generated object) object {
	name := string(r.rpc.Name())
	operation := object{
		"operationId": generated["operationId"], "summary": firstSentence(generated["summary"], generated["description"]),
		"description": described(generated), "tags": []string{strings.TrimSuffix(string(r.rpc.Parent().Name()), "Service")},
		"parameters": parametersOf(r, generated), "responses": responsesOf(r, name, generated),
	}
	if r.body != "" {
		operation["requestBody"] = object{
			"required": true, "content": object{"application/json": object{"schema": bodySchema(r)}},
		}
	}
	return operation
}

func described(generated object) string {
	summary, _ := generated["summary"].(string)
	description, _ := generated["description"].(string)
	return strings.TrimSpace(summary + "\n" + description)
}

func firstSentence(texts ...any) string {
	for _, text := range texts {
		if text, ok := text.(string); ok && text != "" {
			sentence, _, _ := strings.Cut(text, ". ")
			sentence, _, _ = strings.Cut(sentence, ".\n")
			return strings.ReplaceAll(strings.TrimSuffix(sentence, "."), "\n", " ")
		}
	}
	return ""
}

// parametersOf gives those of path and query, and the headers that the edge takes.
func parametersOf(r *route, generated object) []object {
	found := []object{}
	given, _ := generated["parameters"].([]any)
	for _, one := range given {
		one := one.(object)
		if one["in"] == "body" || r.isOther(one) {
			continue
		}
		name := one["name"].(string)
		if cut := strings.LastIndexByte(name, '.'); cut >= 0 {
			name = name[cut+1:]
		}
		schema := object{}
		for _, key := range []string{"type", "format", "items", "pattern"} {
			if one[key] != nil {
				schema[key] = one[key]
			}
		}
		parameter := object{"name": name, "in": one["in"], "schema": narrow(r, name, schema)}
		if one["description"] != nil {
			parameter["description"] = one["description"]
		}
		if one["in"] == "path" || slices.Contains(needed[string(r.rpc.Input().Name())], name) {
			parameter["required"] = true
		}
		found = append(found, parameter)
	}
	if r.rpc.Name() == "CreateTweet" {
		found = append(found, object{
			"name": "Idempotency-Key", "in": "header", "schema": object{"type": "string", "format": "idempotency-key"},
			"description": "1 to 255 visible ASCII characters, such as a UUID: for 24 h a repeat with the same key and body " +
				"gives the same tweet.",
		})
	}
	if r.rpc.Name() == "UpdateTweet" {
		found = append(found, object{
			"name": "If-Match", "in": "header", "schema": object{"type": "string", "format": "entity-tag"},
			"description": "A tweet's ETag: edit that version, or nothing (412).",
		})
	}
	return found
}

// isOther: the field is of the body, or excluded by one that the path has.
func (r *route) isOther(parameter object) bool {
	name := parameter["name"].(string)
	inQuery := parameter["in"] == "query"
	found := r.rpc.Input().Fields().ByJSONName(name)
	return inQuery && (strings.HasPrefix(name, r.body+".") && r.body != "" || found != nil && r.otherKey(found))
}

// narrow says of a parameter or a body's field what its type doesn't.
func narrow(r *route, name string, schema object) object {
	message := r.rpc.Input()
	if r.body != "" && r.body != "*" && message.Fields().ByJSONName(name) == nil {
		message = message.Fields().ByName(protoreflect.Name(r.body)).Message()
	}
	switch {
	case name == "limit":
		schema["minimum"] = 0
	case name == "cursor":
		schema["format"] = "cursor"
	case schema["format"] == "uint64":
		schema["pattern"] = idPattern
	case schema["type"] == "array" && strings.HasSuffix(name, "Ids") && name != "mediaIds":
		schema["items"] = object{"type": "string", "format": "uint64", "pattern": idPattern}
		schema["minItems"], schema["maxItems"] = 1, 100
	}
	maps.Copy(schema, narrowed[string(message.Name())+"."+name])
	return schema
}

// bodySchema gives what a body may hold. Numbers of 64 bits may be strings or numbers.
func bodySchema(r *route) object {
	message := r.rpc.Input()
	if r.body != "*" {
		message = message.Fields().ByName(protoreflect.Name(r.body)).Message()
	}
	properties := object{}
	for i := range message.Fields().Len() {
		f := message.Fields().Get(i)
		name := f.JSONName()
		if string(message.Name()) == "Tweet" && name != "text" {
			continue // An edit changes nothing else.
		}
		switch {
		case f.IsList():
			properties[name] = narrow(r, name, object{"type": "array", "items": object{"type": "string"}})
		case f.Kind() == protoreflect.Uint64Kind:
			limits := object{"type": "integer", "minimum": 1, "maximum": 1<<63 - 1}
			maps.Copy(limits, narrowed[string(message.Name())+"."+name])
			pattern := idPattern
			if limits["minimum"] != 1 {
				pattern = decimalsUpTo(limits)
			}
			properties[name] = object{"oneOf": []object{limits, {"type": "string", "format": "uint64", "pattern": pattern}}}
		case f.Kind() == protoreflect.StringKind:
			properties[name] = narrow(r, name, object{"type": "string"})
		default:
			panic("a field of a kind that no body has had: " + string(f.FullName()))
		}
	}
	schema := object{"type": "object", "properties": properties, "additionalProperties": false}
	if fields := needed[string(r.rpc.Input().Name())]; len(fields) > 0 {
		schema["required"] = fields
	}
	return schema
}

// decimalsUpTo is a pattern for numbers that may be smaller than an id.
func decimalsUpTo(limits object) string {
	if limits["maximum"] == 1<<63-1 {
		return "^(0|[1-9][0-9]{0,18})$"
	}
	return "^([2-9]|[1-9][0-9]{1,8})$"
}

func responsesOf(r *route, name string, generated object) object {
	responses := object{}
	success, _ := generated["responses"].(object)["200"].(object)
	schema := success["schema"]
	status, headers := 200, rateHeaders()
	switch name {
	case "CreateTweet", "Retweet":
		status = 201
		headers[readYourWriteHeader] = header("Pass it as readYourWriteToken to see the tweet in the very next page.")
		headers["Location"] = header("Where the tweet is.")
	case "CreateUser":
		status = 201
		headers["Location"] = header("Where the user is.")
	case "DeleteTweet":
		status = 204
	}
	answer := object{"description": "Done.", "headers": headers}
	if status != 204 {
		answer["content"] = object{"application/json": object{"schema": schema}}
	}
	if r.method == http.MethodGet {
		headers["ETag"] = header("For If-None-Match.")
		responses["304"] = object{"description": "As If-None-Match has it."}
	}
	responses[strconv.Itoa(status)] = answer
	for _, code := range append([]int{400, 401, 403, 413, 429, 500, 503, 504}, problemsOf[name]...) {
		responses[strconv.Itoa(code)] = object{"$ref": "#/components/responses/" + strconv.Itoa(code)}
	}
	if r.body != "" {
		responses["415"] = object{"$ref": "#/components/responses/415"}
	}
	return responses
}

func header(text string) object {
	return object{"description": text, "schema": object{"type": "string"}}
}

func rateHeaders() object {
	return object{
		"RateLimit-Limit":     header("Requests that may come at once."),
		"RateLimit-Remaining": header("Requests left now."),
		"RateLimit-Reset":     header("Seconds until all are there again."),
	}
}

func problemResponses() object {
	responses := object{}
	for code, meaning := range meanings {
		one := object{
			"description": meaning,
			"content":     object{"application/problem+json": object{"schema": object{"$ref": "#/components/schemas/Problem"}}},
		}
		switch code {
		case 429, 503:
			one["headers"] = object{"Retry-After": header("Seconds.")}
		case 401:
			one["headers"] = object{"WWW-Authenticate": header("Bearer.")}
		}
		responses[strconv.Itoa(code)] = one
	}
	return responses
}

// schemasOf gives the messages of answers: all but their messages' fields are always there.
func schemasOf(definitions object) object {
	for name, one := range definitions {
		if strings.HasSuffix(name, "Request") || strings.HasSuffix(name, "Body") || strings.HasPrefix(name, "google") {
			delete(definitions, name)
			continue
		}
		properties, _ := one.(object)["properties"].(object)
		always := []string{}
		for field, schema := range properties {
			schema, _ := schema.(object)
			if schema["$ref"] == nil && schema["allOf"] == nil && schema["format"] != "date-time" {
				always = append(always, field)
			}
		}
		slices.Sort(always)
		if len(always) > 0 {
			one.(object)["required"] = always
		}
	}
	text := object{"type": "string"}
	definitions["Problem"] = object{
		"type": "object", "description": "An error (RFC 9457).", "required": []string{"type", "title", "status", "reason"},
		"properties": object{
			"type": text, "title": text, "status": object{"type": "integer"}, "detail": text,
			"reason": object{"type": "string", "description": "Stable, for programs."},
			"fields": object{"type": "array", "items": object{
				"type": "object", "required": []string{"field", "description"},
				"properties": object{"field": object{"type": "string", "description": "Empty: the whole request."}, "description": text},
			}},
		},
	}
	return definitions
}

func meOperation(of object) object {
	operation := maps.Clone(of)
	operation["operationId"] = "GetMe"
	operation["parameters"] = []object{}
	operation["summary"], operation["description"] = "The calling user", "The calling user; operators are none."
	return operation
}

func streamOperation() object {
	responses := object{"200": object{
		"description": "Events `item` (data: a HomeTimelineItem; id: the greatest itemId so far), `gap` (something may have been " +
			"left out: catch up with newerThanId), `heartbeat`, and `error` (data: a Problem), after which it ends; connect again. " +
			"With `Upgrade: websocket` the same as text frames {\"type\", \"id\", \"data\"}; browsers pass their token as " +
			"subprotocols `starling.v1, bearer.<token>`.",
		"content": object{"text/event-stream": object{"schema": object{"type": "string"}}},
	}}
	for _, code := range []int{400, 401, 403, 404, 429, 500, 503, 504} {
		responses[strconv.Itoa(code)] = object{"$ref": "#/components/responses/" + strconv.Itoa(code)}
	}
	number := object{"type": "string", "format": "uint64", "pattern": "^(0|[1-9][0-9]{0,18})$"}
	return object{
		"operationId": "StreamHomeTimeline", "tags": []string{"Timeline"}, "summary": "What comes to the caller's home timeline",
		"description": "Server-sent events: each item once, best effort; a catch-up is exact. What has come since an item " +
			"comes first, and a minute of what was before it, since one of those may have been committed later: drop what you have.",
		"parameters": []object{
			{"name": "newerThanId", "in": "query", "schema": number, "description": "Begin with what has come since this item."},
			{"name": "Last-Event-ID", "in": "header", "schema": number, "description": "The same, as browsers send it when they connect again."},
		},
		"responses": responses,
	}
}

func (e *edge) serveDocument(w http.ResponseWriter, r *http.Request) {
	answer := &answer{header: w.Header()}
	answer.header.Set("Content-Type", "application/json")
	_, _ = answer.Write(e.document)
	answer.send(w, r)
}

// newViewer serves Swagger UI's files, which are in this binary.
func newViewer() http.Handler {
	return http.StripPrefix(viewerPath, statigz.FileServer(static.FS))
}

func (e *edge) serveViewer(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Security-Policy", viewerPolicy)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	switch r.URL.Path {
	case viewerPath, viewerPath + "/":
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = w.Write([]byte(viewerPage))
	case viewerPath + "/viewer.js":
		w.Header().Set("Content-Type", "text/javascript; charset=utf-8")
		_, _ = w.Write([]byte(viewerScript))
	default:
		e.viewer.ServeHTTP(w, r)
	}
}
