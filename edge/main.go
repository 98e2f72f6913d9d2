// The edge: REST and JSON, server-sent events and WebSockets over the gRPC services, and the web page.
//
// A request passes, in order: what comes from elsewhere (CORS), the overload gate, its route, the address's limit, the
// token, the user's limit, the checks of path, query and body, the idempotency key; then grpc-gateway makes the call.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"sync"
	"syscall"
	"time"
)

// gcPercent: the heap is some megabytes, and at Go's 100 it is looked through all the time.
const gcPercent = 800

func main() { os.Exit(run()) }

// run serves until SIGTERM or SIGINT. It gives 0 after a clean stop, 1 when something failed, 2 for a wrong configuration.
func run() int {
	debug.SetGCPercent(gcPercent)
	slog.SetDefault(slog.New(slog.NewJSONHandler(os.Stderr, nil)))
	c, wrong := osEnvironment()
	for _, line := range wrong {
		fmt.Fprintln(os.Stderr, line)
	}
	if len(wrong) > 0 {
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	life, end := context.WithCancel(context.Background())
	defer end()
	e, err := newEdge(life, ctx, c)
	if err != nil {
		fmt.Fprintln(os.Stderr, "configuration:", err)
		return 2
	}
	if err := e.serveMetrics(life); err != nil {
		fmt.Fprintln(os.Stderr, "configuration: STARLING_EDGE_METRICS_LISTEN:", err)
		return 2
	}
	listener, err := listen(c)
	if err != nil {
		fmt.Fprintf(os.Stderr, "configuration: STARLING_LISTEN: can't listen on %s: %v\n", c.listen, err)
		return 2
	}
	if c.jwksURL == "" && !isLoopback(listener.Addr().String()) {
		fmt.Fprintf(os.Stderr, "configuration: STARLING_EDGE_JWKS_URL: is needed to listen on %s\n", listener.Addr())
		return 2
	}
	if c.jwksURL == "" {
		slog.Warn("DEVELOPMENT: tokens signed with STARLING_AUTH_SECRET are taken from clients; set STARLING_EDGE_JWKS_URL elsewhere")
	}
	return serve(ctx, e, listener)
}

func newEdge(ctx, draining context.Context, c config) (*edge, error) {
	id, err := newIdentity(ctx, c, time.Now)
	if err != nil {
		return nil, err
	}
	to, err := connectAll(c)
	if err != nil {
		return nil, err
	}
	gateway, err := newGateway(ctx, to)
	if err != nil {
		return nil, err
	}
	static, err := newStatic(c.web)
	if err != nil {
		slog.Warn("there is no web page", "error", err)
	}
	common, err := newShared(c.valkeyURL, c.keyPrefix)
	if err != nil {
		return nil, err
	}
	e := &edge{
		config: c, identity: id, routes: annotatedRoutes(), gateway: gateway, to: to, static: static, shared: common,
		draining: draining,
	}
	e.keys.known = map[string]struct{}{}
	e.document = document(e.routes)
	e.viewer = newViewer()
	e.outer = e.around()
	return e, nil
}

func connectAll(c config) (connections, error) {
	var to connections
	var faults []error
	var err error
	to.graph, err = connect(c.graphTarget)
	faults = append(faults, err)
	to.tweet, err = connect(c.tweetTarget)
	faults = append(faults, err)
	to.timeline, err = connect(c.timelineTarget)
	faults = append(faults, err)
	to.fanout, err = connect(c.fanoutTargets[0])
	faults = append(faults, err)
	return to, errors.Join(faults...)
}

// listen takes the socket that the launcher holds over restarts, or makes one.
func listen(c config) (net.Listener, error) {
	if c.listenFD < 0 {
		return net.Listen("tcp", c.listen)
	}
	file := os.NewFile(uintptr(c.listenFD), "listener")
	defer file.Close()
	return net.FileListener(file)
}

func serve(ctx context.Context, e *edge, listener net.Listener) int {
	open := &openConnections{idleSince: map[net.Conn]time.Time{}}
	server := &http.Server{
		Handler:   e,
		ConnState: open.note,
		ConnContext: func(ctx context.Context, conn net.Conn) context.Context {
			return context.WithValue(ctx, connectionKey{}, conn)
		},
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       30 * time.Second,
		WriteTimeout:      e.config.timeout + 30*time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    e.config.headerBytesMax,
		ErrorLog:          slog.NewLogLogger(slog.Default().Handler(), slog.LevelDebug),
	}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	address := listener.Addr().String()
	slog.Info("edge serves", "address", address, "pid", os.Getpid())
	if e.config.addressFile != "" {
		if err := os.WriteFile(e.config.addressFile, []byte(address), 0o644); err != nil {
			slog.Error("the address can't be written", "error", err)
			return 1
		}
	}
	select {
	case err := <-failed:
		slog.Error("edge can't serve", "error", err)
		return 1
	case <-ctx.Done():
	}
	return e.stop(server, open)
}

const (
	unusedAfter = 2500 * time.Millisecond // an idle connection that is hardly used again
	drainPoll   = 50 * time.Millisecond
)

// openConnections are those that clients may send something on.
type openConnections struct {
	mutex     sync.Mutex
	idleSince map[net.Conn]time.Time // zero: in use
}

func (o *openConnections) note(conn net.Conn, state http.ConnState) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	switch state {
	case http.StateClosed, http.StateHijacked:
		delete(o.idleSince, conn)
	case http.StateIdle:
		o.idleSince[conn] = time.Now()
	default:
		o.idleSince[conn] = time.Time{}
	}
}

// quiet says whether all have been idle for some time.
func (o *openConnections) quiet() bool {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	for _, since := range o.idleSince {
		if since.IsZero() || time.Since(since) < unusedAfter {
			return false
		}
	}
	return true
}

// stop ends without a client's noticing: what comes on open connections is answered, and told to come on another one
// next time; only those that nobody uses are closed. New ones wait at the launcher's socket, or go to other edges.
func (e *edge) stop(server *http.Server, open *openConnections) int {
	slog.Info("edge drains", "pid", os.Getpid())
	time.Sleep(e.config.drainLeast)
	for end := time.Now().Add(e.config.drain); !open.quiet() && time.Now().Before(end); {
		time.Sleep(drainPoll)
	}
	ctx, cancel := context.WithTimeout(context.Background(), e.config.grace)
	defer cancel()
	if err := server.Shutdown(ctx); err != nil {
		slog.Warn("some requests didn't end in time", "error", err)
		_ = server.Close()
	}
	slog.Info("edge has stopped", "pid", os.Getpid())
	return 0
}
