package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/klauspost/compress/gzhttp"
	"github.com/rs/cors"
)

// edge serves everything: the API, its document, the page, and what tells of its health.
type edge struct {
	config   config
	identity *identity
	routes   routes
	gateway  http.Handler
	to       connections
	static   http.Handler
	shared   *shared
	keys     keysInHand
	document []byte
	viewer   http.Handler
	calls    atomic.Int64
	streams  atomic.Int64
	draining context.Context // done when this process is about to stop
	outer    http.Handler    // what comes from elsewhere, and compression, around dispatch
}

const readyPath = "/readyz"

// ServeHTTP serves one request, whatever goes wrong in it.
func (e *edge) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	seen := &seenWriter{ResponseWriter: w}
	began := time.Now()
	trace := traceOf(r)
	w.Header().Set("Traceparent", trace)
	if e.draining.Err() != nil {
		w.Header().Set("Connection", "close")
	}
	defer func() {
		if cause := recover(); cause != nil && cause != http.ErrAbortHandler {
			slog.Error("a request failed", "path", r.URL.Path, "cause", cause, "stack", string(debug.Stack()))
			if seen.status == 0 {
				newProblem(http.StatusInternalServerError, "INTERNAL", "Something went wrong here; it is in the logs.").send(seen)
			}
		}
		elapsed := time.Since(began)
		if seen.rpc != "" {
			observe(seen.rpc, seen.status, elapsed.Seconds())
		}
		if e.config.logRequests || seen.status >= 500 && r.URL.Path != readyPath {
			slog.Info("request", "method", r.Method, "path", r.URL.Path, "status", seen.status,
				"ms", float64(elapsed.Microseconds())/1000, "caller", seen.caller, "trace", trace)
		}
	}()
	e.outer.ServeHTTP(seen, r.WithContext(context.WithValue(r.Context(), tracedKey{}, traced{trace, seen})))
}

// traced goes with a request through the handlers of others.
type traced struct {
	parent string
	seen   *seenWriter
}

type tracedKey struct{}

// around puts the handlers of others around dispatch: CORS, and compression but for streams.
func (e *edge) around() http.Handler {
	compress, err := gzhttp.NewWrapper(gzhttp.MinSize(1<<10), gzhttp.CompressionLevel(gzip.BestSpeed))
	if err != nil {
		panic(err)
	}
	compressed := compress(http.HandlerFunc(e.dispatch))
	inner := http.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if isStream(r) {
			e.dispatch(w, r)
		} else {
			compressed.ServeHTTP(w, r)
		}
	}))
	if len(e.config.corsOrigins) == 0 {
		return inner
	}
	return cors.New(cors.Options{
		AllowedOrigins: e.config.corsOrigins,
		AllowedMethods: []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPatch, http.MethodDelete},
		AllowedHeaders: []string{
			"Authorization", "Content-Type", "Idempotency-Key", "If-None-Match", "If-Match", "Last-Event-ID",
			"Grpc-Timeout", "Traceparent",
		},
		ExposedHeaders: []string{
			"ETag", "Location", "Retry-After", "RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset",
			readYourWriteHeader, "Traceparent",
		},
		MaxAge: 600,
	}).Handler(inner)
}

func isStream(r *http.Request) bool { return strings.TrimRight(r.URL.Path, "/") == streamPath }

func (e *edge) dispatch(w http.ResponseWriter, r *http.Request) {
	with, _ := r.Context().Value(tracedKey{}).(traced)
	switch {
	case r.URL.Path == "/healthz":
		_, _ = io.WriteString(w, "ok\n")
	case r.URL.Path == readyPath:
		e.readyz(w)
	case isStream(r):
		e.stream(w, r, with)
	case strings.HasPrefix(r.URL.Path, apiPrefix):
		e.api(w, r, with)
	case r.URL.Path == documentPath:
		e.serveDocument(w, r)
	case r.URL.Path == viewerPath || strings.HasPrefix(r.URL.Path, viewerPath+"/"):
		e.serveViewer(w, r)
	default:
		e.static.ServeHTTP(w, r)
	}
}

func (e *edge) readyz(w http.ResponseWriter) {
	away := map[string]bool{"graph_svc": !ready(e.to.graph), "tweet_svc": !ready(e.to.tweet), "timeline_svc": !ready(e.to.timeline)}
	if e.draining.Err() != nil || away["graph_svc"] || away["tweet_svc"] || away["timeline_svc"] {
		newProblem(http.StatusServiceUnavailable, "NOT_READY", "This edge drains, or a service behind it is away.").send(w)
		return
	}
	_, _ = io.WriteString(w, "ok\n")
}

// api serves a path below /api/v1/.
func (e *edge) api(w http.ResponseWriter, r *http.Request, with traced) {
	if e.calls.Load() >= int64(e.config.callsMax) {
		newProblem(http.StatusServiceUnavailable, "OVERLOADED", "Too many calls at once.").send(w)
		return
	}
	path := r.URL.Path
	if trimmed := strings.TrimRight(path, "/"); trimmed+"/" == path {
		path = trimmed
	}
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	lookup := path
	if path == mePath {
		lookup = apiPrefix + "users/0"
	}
	found, variables, allowed := e.routes.find(method, lookup)
	if found == nil {
		e.unrouted(w, method, allowed)
		return
	}
	with.seen.rpc = string(found.rpc.Name())
	who, refused := e.admit(w, r, with.seen)
	if refused != nil {
		refused.send(w)
		return
	}
	if path == mePath {
		if who.userID == "" {
			newProblem(http.StatusForbidden, "USERS_ONLY", "Only a user may call this.").send(w)
			return
		}
		path = apiPrefix + "users/" + who.userID
		variables = map[string]string{"user_id": who.userID}
	}
	if refused = found.checkPath(variables); refused == nil {
		refused = found.checkQuery(r.URL.RawQuery, variables)
	}
	if refused != nil {
		refused.send(w)
		return
	}
	body, refused := found.readBody(w, r, e.config.bodyBytesMax)
	if refused != nil {
		refused.send(w)
		return
	}
	// Only now: a body that trickles in is no call yet.
	if e.calls.Add(1) > int64(e.config.callsMax) {
		e.calls.Add(-1)
		newProblem(http.StatusServiceUnavailable, "OVERLOADED", "Too many calls at once.").send(w)
		return
	}
	defer e.calls.Add(-1)
	x := &exchange{route: found, body: body, traceparent: with.parent}
	if x.ifVersion, refused = found.condition(r); refused != nil {
		refused.send(w)
		return
	}
	if key := r.Header.Get("Idempotency-Key"); key != "" && found.rpc.Name() == "CreateTweet" {
		if x.requestID, refused = requestIDOf(key); refused == nil {
			refused = e.takeKey(r.Context(), who.subject, x.requestID)
		}
		if refused != nil {
			refused.send(w)
			return
		}
		defer e.releaseKey(who.subject, x.requestID)
	}
	ctx, cancel := context.WithTimeout(context.WithValue(r.Context(), exchangeKey{}, x), e.config.timeout)
	defer cancel()
	call := r.Clone(ctx)
	call.Header = http.Header{} // The gateway would pass on what clients say of forwarding, unread.
	for _, name := range []string{"Content-Type", "Grpc-Timeout"} {
		if value := r.Header.Get(name); value != "" {
			call.Header.Set(name, value)
		}
	}
	call.Method, call.URL.Path, call.URL.RawPath = method, path, ""
	call.Header.Set("Authorization", who.bearer)
	call.Body = io.NopCloser(bytes.NewReader(body))
	answer := &answer{header: w.Header()}
	e.gateway.ServeHTTP(answer, call)
	answer.version = x.version
	answer.send(w, r)
}

// admit gives the caller, if there is a token for this request in the buckets of its address and user.
func (e *edge) admit(w http.ResponseWriter, r *http.Request, seen *seenWriter) (caller, *problem) {
	var who caller
	token, refused := bearerOf(r)
	if refused == nil {
		who, refused = e.identity.verify(token)
	}
	seen.caller = who.subject
	if limited := e.limit(w, r, who.subject); limited != nil {
		return caller{}, limited
	}
	return who, refused
}

// unrouted answers for a path or method that isn't there, and OPTIONS for one that is.
func (e *edge) unrouted(w http.ResponseWriter, method string, allowed []string) {
	if len(allowed) == 0 {
		newProblem(http.StatusNotFound, "NO_SUCH_PATH", "There is nothing at this path.").send(w)
		return
	}
	w.Header().Set("Allow", allowHeader(allowed))
	if method == http.MethodOptions {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	newProblem(http.StatusMethodNotAllowed, "METHOD_NOT_ALLOWED", "This path doesn't have this method.").send(w)
}

func allowHeader(methods []string) string {
	all := append([]string{}, methods...)
	for _, method := range methods {
		if method == http.MethodGet {
			all = append(all, http.MethodHead)
		}
	}
	return strings.Join(append(all, http.MethodOptions), ", ")
}

// answer collects what the gateway says, so that it can be tagged.
type answer struct {
	header  http.Header
	status  int
	body    []byte
	version uint32 // of the tweet that it is; 0: it is none
}

func (a *answer) Header() http.Header { return a.header }

func (a *answer) WriteHeader(status int) {
	if a.status == 0 {
		a.status = status
	}
}

func (a *answer) Write(text []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	if a.body == nil {
		a.body = text // The gateway writes an answer whole, and lets go of it.
	} else {
		a.body = append(a.body, text...)
	}
	return len(text), nil
}

// send passes the answer on; a read has an ETag, and is not sent again to who has it.
func (a *answer) send(w http.ResponseWriter, r *http.Request) {
	a.WriteHeader(http.StatusOK)
	isRead := r.Method == http.MethodGet || r.Method == http.MethodHead
	if isRead && a.status == http.StatusOK {
		sum := sha256.Sum256(a.body)
		tag := `W/"` + a.tagStart() + base64.RawURLEncoding.EncodeToString(sum[:12]) + `"`
		a.header.Set("ETag", tag)
		a.header.Set("Cache-Control", "private, no-cache")
		a.header.Add("Vary", "Authorization")
		if hasTag(r.Header.Values("If-None-Match"), tag) {
			a.header.Del("Content-Type")
			w.WriteHeader(http.StatusNotModified)
			return
		}
	}
	if !isRead && a.version > 0 {
		a.header.Set("ETag", `W/"`+strings.TrimSuffix(a.tagStart(), ".")+`"`)
	}
	if a.status == http.StatusNoContent {
		a.header.Del("Content-Type")
		w.WriteHeader(a.status)
		return
	}
	a.header.Set("Content-Length", strconv.Itoa(len(a.body)))
	w.WriteHeader(a.status)
	_, _ = w.Write(a.body)
}

// tagStart begins a tweet's tag with its version, which is what If-Match is about: counts change without one.
func (a *answer) tagStart() string {
	if a.version == 0 {
		return ""
	}
	return strconv.FormatUint(uint64(a.version), 10) + "."
}

// hasTag compares weakly, as If-None-Match wants it.
func hasTag(headers []string, tag string) bool {
	for _, header := range headers {
		for one := range strings.SplitSeq(header, ",") {
			one = strings.TrimSpace(one)
			if one == "*" || strings.TrimPrefix(one, "W/") == strings.TrimPrefix(tag, "W/") {
				return true
			}
		}
	}
	return false
}

// traceOf goes on with the trace of a request (W3C Trace Context), or begins one. Whether it is recorded isn't the
// client's to say.
func traceOf(r *http.Request) string {
	given := strings.Split(r.Header.Get("Traceparent"), "-")
	trace := ""
	if len(given) == 4 && isHex(given[1], 32) && isHex(given[3], 2) && given[0] == "00" {
		trace = given[1]
	}
	var random [24]byte
	_, _ = rand.Read(random[:])
	if trace == "" {
		trace = hex.EncodeToString(random[:16])
	}
	return "00-" + trace + "-" + hex.EncodeToString(random[16:]) + "-00"
}

func isHex(text string, length int) bool {
	if len(text) != length || strings.Trim(text, "0") == "" && length > 2 {
		return false
	}
	return strings.Trim(text, "0123456789abcdef") == ""
}

// seenWriter remembers what is said of a request.
type seenWriter struct {
	http.ResponseWriter
	status int
	caller string
	rpc    string // "": none was found
}

func (w *seenWriter) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *seenWriter) Write(text []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	return w.ResponseWriter.Write(text)
}

// Unwrap lets http.ResponseController find the writer below.
func (w *seenWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
