package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"mime"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"google.golang.org/protobuf/reflect/protoreflect"
)

var (
	natural = regexp.MustCompile(`^(0|[1-9]\d*)$`)
	integer = regexp.MustCompile(`^(0|-?[1-9]\d*)$`)
)

// valueFault says what is wrong with a parameter's text, "" if nothing is. Numbers are decimal, since the gateway would
// take "010" for 8.
func valueFault(of protoreflect.FieldDescriptor, text string) string {
	var err error
	switch of.Kind() {
	case protoreflect.Uint64Kind:
		if _, err = strconv.ParseUint(text, 10, 64); err != nil || !natural.MatchString(text) {
			return "Should be a decimal number from 0 to 18446744073709551615."
		}
	case protoreflect.Uint32Kind:
		if _, err = strconv.ParseUint(text, 10, 32); err != nil || !natural.MatchString(text) {
			return "Should be a decimal number from 0 to 4294967295."
		}
	case protoreflect.Int32Kind:
		if _, err = strconv.ParseInt(text, 10, 32); err != nil || !integer.MatchString(text) {
			return "Should be a decimal number of 32 bits."
		}
	default:
		if !utf8.ValidString(text) || strings.ContainsRune(text, 0) {
			return "Not valid text."
		}
	}
	return ""
}

// checkPath says what is wrong with the path's variables, nil if nothing is.
func (r *route) checkPath(variables map[string]string) *problem {
	for path, text := range variables {
		if fault := valueFault(field(r.rpc.Input(), path), text); fault != "" {
			return badField("INVALID_ARGUMENT", r.jsonName(path), fault)
		}
	}
	return nil
}

// checkQuery refuses parameters that are unknown, repeated or no values of their fields: the gateway would drop some of
// them in silence. Their names are JSON names.
func (r *route) checkQuery(raw string, variables map[string]string) *problem {
	if raw == "" {
		return nil
	}
	given, err := url.ParseQuery(raw)
	if err != nil {
		return badField("INVALID_ARGUMENT", "", "The query string can't be read.")
	}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		found := r.rpc.Input().Fields().ByJSONName(name)
		if found == nil || r.body == "*" || string(found.Name()) == r.body || variables[string(found.Name())] != "" || r.otherKey(found) {
			return badField("UNKNOWN_PARAMETER", name, "There is no such parameter here.")
		}
		if !found.IsList() && len(given[name]) > 1 {
			return badField("INVALID_ARGUMENT", name, "It is there twice.")
		}
		for _, text := range given[name] {
			if fault := valueFault(found, text); fault != "" {
				return badField("INVALID_ARGUMENT", name, fault)
			}
		}
	}
	return nil
}

// otherKey: one field of a oneof is in the path, so the others have no place.
func (r *route) otherKey(f protoreflect.FieldDescriptor) bool {
	return f.ContainingOneof() != nil && !f.ContainingOneof().IsSynthetic()
}

// readBody reads and checks a body, so that what is wrong with it has a field where there is one.
func (r *route) readBody(w http.ResponseWriter, request *http.Request, bytesMax int64) ([]byte, *problem) {
	if request.ContentLength > bytesMax {
		return nil, newProblem(http.StatusRequestEntityTooLarge, "BODY_TOO_LARGE", "The body has more than "+strconv.FormatInt(bytesMax, 10)+" bytes.")
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, request.Body, bytesMax))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, newProblem(http.StatusRequestEntityTooLarge, "BODY_TOO_LARGE", "The body has more than "+strconv.FormatInt(bytesMax, 10)+" bytes.")
	case err != nil:
		return nil, newProblem(http.StatusBadRequest, "BODY_INCOMPLETE", "The body ended too early.")
	}
	if r.body == "" {
		if trimmed := bytes.TrimSpace(body); len(trimmed) > 0 && !bytes.Equal(trimmed, []byte("{}")) {
			return nil, badField("UNEXPECTED_BODY", "", "This takes no body.")
		}
		return nil, nil
	}
	if len(body) > 0 || request.Header.Get("Content-Type") != "" {
		if refused := checkContentType(request); refused != nil {
			return nil, refused
		}
	}
	if refused := checkJSON(body); refused != nil {
		return nil, refused
	}
	return body, r.checkTypes(body)
}

// checkTypes refuses what the gateway would take more widely than it is documented: null, 1e3, proto names.
func (r *route) checkTypes(body []byte) *problem {
	message := r.rpc.Input()
	if r.body != "*" {
		message = message.Fields().ByName(protoreflect.Name(r.body)).Message()
	}
	var given map[string]json.RawMessage
	if err := json.Unmarshal(body, &given); err != nil {
		return badField("INVALID_ARGUMENT", "", "A JSON object is needed.")
	}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		found := message.Fields().ByJSONName(name)
		if found == nil {
			return badField("UNKNOWN_FIELD", name, "There is no such field.")
		}
		if fault := typeFault(found, given[name]); fault != "" {
			return badField("INVALID_ARGUMENT", name, fault)
		}
	}
	return nil
}

// typeFault says what is wrong with a field's value, "" if nothing is.
func typeFault(of protoreflect.FieldDescriptor, value json.RawMessage) string {
	switch {
	case of.IsList():
		if value[0] != '[' {
			return "Should be a list."
		}
	case of.Kind() == protoreflect.Uint64Kind:
		return valueFault(of, strings.Trim(string(value), `"`))
	case of.Kind() == protoreflect.StringKind:
		if value[0] != '"' {
			return "Should be a string."
		}
	}
	return ""
}

var versionTag = regexp.MustCompile(`^(?:W/)?"([1-9]\d{0,8})(?:\.[\w-]*)?"$`)

// condition gives the version that If-Match asks for, 0 without one. Only edits can be bound to a version; elsewhere a
// condition is refused, not passed over.
func (r *route) condition(request *http.Request) (uint32, *problem) {
	header := request.Header.Get("If-Match")
	if header == "" || header == "*" {
		return 0, nil
	}
	if r.rpc.Name() != "UpdateTweet" {
		return 0, badField("CONDITION_NOT_SUPPORTED", "If-Match", "There are no conditions here.")
	}
	found := versionTag.FindStringSubmatch(header)
	if found == nil {
		return 0, newProblem(http.StatusPreconditionFailed, "VERSION_MISMATCH", "No version of a tweet has this ETag.")
	}
	version, _ := strconv.ParseUint(found[1], 10, 32)
	return uint32(version), nil
}

func checkContentType(request *http.Request) *problem {
	kind, parameters, err := mime.ParseMediaType(request.Header.Get("Content-Type"))
	isJSON := kind == "application/json" || kind == "application/merge-patch+json" && request.Method == http.MethodPatch
	charset := strings.ToLower(parameters["charset"])
	if err != nil || !isJSON || charset != "" && charset != "utf-8" {
		return newProblem(http.StatusUnsupportedMediaType, "UNSUPPORTED_MEDIA_TYPE", "Send application/json in UTF-8.")
	}
	return nil
}

func checkJSON(body []byte) *problem {
	if len(bytes.TrimSpace(body)) == 0 {
		return badField("INVALID_ARGUMENT", "", "A JSON object is needed.")
	}
	for offset := 0; offset < len(body); {
		character, size := utf8.DecodeRune(body[offset:])
		if character == utf8.RuneError && size == 1 {
			return badField("INVALID_ARGUMENT", fieldAt(body, offset), "Not valid text: bytes that aren't UTF-8.")
		}
		offset += size
	}
	var any json.RawMessage
	var syntax *json.SyntaxError
	if err := json.Unmarshal(body, &any); errors.As(err, &syntax) {
		return badField("INVALID_ARGUMENT", fieldAt(body, int(syntax.Offset)-1), "Not valid JSON.")
	}
	if bytes.TrimSpace(any)[0] != '{' {
		return badField("INVALID_ARGUMENT", "", "A JSON object is needed.")
	}
	if at := loneSurrogate(body); at >= 0 {
		return badField("INVALID_ARGUMENT", fieldAt(body, at), "Not valid text: half of a surrogate pair.")
	}
	return nil
}

// loneSurrogate finds an escape such as \ud83d that stands for no character, in valid JSON; -1: there is none.
func loneSurrogate(body []byte) int {
	for at := 0; at+1 < len(body); at++ {
		if body[at] != '\\' {
			continue
		}
		first := escaped(body[at:])
		switch {
		case !utf16.IsSurrogate(first):
			at++ // What follows a backslash begins no escape.
		case utf16.DecodeRune(first, escaped(body[at+6:])) == utf8.RuneError:
			return at
		default:
			at += 11
		}
	}
	return -1
}

// escaped gives the code unit of an escape \uXXXX at the start of a text, -1 if there is none.
func escaped(text []byte) rune {
	if len(text) < 6 || text[0] != '\\' || text[1] != 'u' {
		return -1
	}
	unit, err := strconv.ParseUint(string(text[2:6]), 16, 16)
	if err != nil {
		return -1
	}
	return rune(unit)
}

// offsetOf gives the place that protojson names, as an offset in bytes. Its columns count characters.
func offsetOf(body []byte, line, column string) int {
	lines, _ := strconv.Atoi(line)
	columns, _ := strconv.Atoi(column)
	offset := 0
	for range lines - 1 {
		next := bytes.IndexByte(body[offset:], '\n')
		if next < 0 {
			return len(body)
		}
		offset += next + 1
	}
	for range columns - 1 {
		_, size := utf8.DecodeRune(body[offset:])
		offset += size
	}
	return offset
}

// fieldAt gives the path of the value at a place in a JSON text, such as "mediaIds[1]"; as far as it can be read.
func fieldAt(body []byte, offset int) string {
	type level struct {
		key     string
		index   int
		isArray bool
		wantKey bool
	}
	var stack []level
	path := func() string {
		var out strings.Builder
		for _, l := range stack {
			switch {
			case l.isArray:
				out.WriteString("[" + strconv.Itoa(l.index) + "]")
			case l.key != "":
				if out.Len() > 0 {
					out.WriteByte('.')
				}
				out.WriteString(l.key)
			}
		}
		return out.String()
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.UseNumber()
	for {
		token, err := decoder.Token()
		if err != nil {
			return path()
		}
		top := len(stack) - 1
		isKey := top >= 0 && stack[top].wantKey
		if key, ok := token.(string); ok && isKey {
			stack[top].key, stack[top].wantKey = key, false
			continue
		}
		if token == json.Delim('{') || token == json.Delim('[') {
			stack = append(stack, level{isArray: token == json.Delim('['), wantKey: token == json.Delim('{')})
			continue
		}
		if int64(offset) < decoder.InputOffset() {
			return path()
		}
		if token == json.Delim('}') || token == json.Delim(']') {
			stack = stack[:top]
		}
		if len(stack) == 0 {
			return ""
		}
		if last := &stack[len(stack)-1]; last.isArray {
			last.index++
		} else {
			last.key, last.wantKey = "", true
		}
	}
}
