package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coder/websocket"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	timelinev1 "starling/edge/gen/starling/timeline/v1"
)

const (
	streamProtocol = "starling.v1"
	bearerProtocol = "bearer."
	decideWithin   = 300 * time.Millisecond // so long a refusal may still become a status
	writeWithin    = 10 * time.Second       // a client that takes nothing for so long has vanished
	unreadBytesMax = 64 << 10               // the kernel would keep megabytes for a client that doesn't read
	silenceMax     = 10 * time.Second       // timeline_svc sends something every 3 s
	eventsWaiting  = 16
	seenMax        = 2_000
	retryAfterMS   = 1_000
	epochMS        = 1_735_689_600_000 // of ids, as mesh/ids.py has it
)

// event is one message to a client. `kind`: item, gap, heartbeat or error; `id`: the greatest item's so far.
type event struct {
	kind string
	id   uint64
	data []byte
}

// sink is a client's end: opened once, before the first event.
type sink interface {
	open() error
	send(event) error
	// close ends it, with a problem unless the client went.
	close(*problem)
}

type connectionKey struct{}

// stream serves a home timeline as it changes, as server-sent events or over a WebSocket.
func (e *edge) stream(w http.ResponseWriter, r *http.Request, with traced) {
	if r.Method != http.MethodGet {
		e.unrouted(w, r.Method, []string{http.MethodGet})
		return
	}
	if e.streams.Add(1) > int64(e.config.streamsMax) || e.draining.Err() != nil {
		e.streams.Add(-1)
		newProblem(http.StatusServiceUnavailable, "OVERLOADED", "Too many streams at once.").send(w)
		return
	}
	defer e.streams.Add(-1)
	with.seen.rpc = "WatchHomeTimeline"
	who, refused := e.admit(w, r, with.seen)
	if refused == nil && who.userID == "" {
		refused = newProblem(http.StatusForbidden, "USERS_ONLY", "Only a user may call this.")
	}
	var newerThan uint64
	if refused == nil {
		newerThan, refused = startOf(r)
	}
	if refused == nil && isWebSocket(r) {
		refused = e.checkOrigin(r)
	}
	if refused != nil {
		refused.send(w)
		return
	}
	if conn, ok := r.Context().Value(connectionKey{}).(*net.TCPConn); ok {
		_ = conn.SetWriteBuffer(unreadBytesMax)
	}
	ctx, cancel := context.WithDeadline(r.Context(), who.expires)
	defer cancel()
	var client sink = &sseSink{w: w, control: http.NewResponseController(w)}
	if isWebSocket(r) {
		client = &socketSink{w: w, r: r, gone: cancel}
	}
	begun := firstIDOf(time.Now())
	e.pump(ctx, w, client, &watching{e, who.subject, with.parent, newerThan, begun, cmp.Or(newerThan, begun)})
}

// pump passes events on until one side ends. What a slow client doesn't take waits in the service, which then leaves it
// out and says so.
func (e *edge) pump(ctx context.Context, w http.ResponseWriter, client sink, watch *watching) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events := make(chan event, eventsWaiting)
	ended := make(chan *problem, 1)
	go func() { ended <- watch.follow(ctx, events) }()
	decided := time.NewTimer(decideWithin)
	defer decided.Stop()
	opened := false
	pass := func(one event) bool {
		if !opened {
			opened = true
			if client.open() != nil {
				return false
			}
			first := event{kind: "heartbeat", id: watch.from, data: []byte("{}")}
			if client.send(first) != nil {
				return false
			}
		}
		return one.kind == "" || client.send(one) == nil
	}
	for {
		select {
		case one := <-events:
			if !pass(one) {
				return
			}
		case <-decided.C:
			if !pass(event{}) {
				return
			}
		case <-e.draining.Done():
			e.finish(w, client, opened, newProblem(http.StatusServiceUnavailable, "RESTARTING", "This edge stops; connect again."))
			return
		case p := <-ended:
			for opened && len(events) > 0 && pass(<-events) {
				continue
			}
			if p != nil {
				e.finish(w, client, opened, p)
			}
			return
		}
	}
}

func (e *edge) finish(w http.ResponseWriter, client sink, opened bool, p *problem) {
	if opened {
		client.close(p)
	} else {
		p.send(w)
	}
}

// startOf gives the newest item that the client has: Last-Event-ID, else the parameter newerThanId; 0: none.
func startOf(r *http.Request) (uint64, *problem) {
	given, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return 0, badField("INVALID_ARGUMENT", "", "The query string can't be read.")
	}
	for name := range given {
		if name != "newerThanId" {
			return 0, badField("UNKNOWN_PARAMETER", name, "There is no such parameter here.")
		}
	}
	name, text := "newerThanId", given.Get("newerThanId")
	if header := r.Header.Get("Last-Event-ID"); header != "" {
		name, text = "Last-Event-ID", header
	}
	if text == "" {
		return 0, nil
	}
	number, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, badField("INVALID_ARGUMENT", name, "Should be an item's id.")
	}
	return number, nil
}

// watching follows one user's home timeline over many short streams of timeline_svc.
type watching struct {
	edge      *edge
	subject   string
	trace     string
	newerThan uint64
	begun     uint64 // the smallest id of when it began
	from      uint64 // what a client that saw nothing yet resumes from
}

// follow sends events until ctx ends (nil), the token does, or the service dies: then it says so, since this is no end.
func (g *watching) follow(ctx context.Context, events chan<- event) *problem {
	newest, seen := g.newerThan, newRecent(seenMax)
	seen.add(g.newerThan)
	failing := time.Time{}
	for renewal := false; ; renewal = true {
		begunAlready, opened := false, time.Now()
		err := g.watch(ctx, newest, func(message *timelinev1.WatchHomeTimelineResponse) error {
			begunAlready, failing = true, time.Time{}
			one := event{kind: "heartbeat", data: []byte("{}")}
			switch kind := message.GetKind().(type) {
			case *timelinev1.WatchHomeTimelineResponse_Gap:
				one.kind = "gap"
			case *timelinev1.WatchHomeTimelineResponse_Item:
				id := kind.Item.GetItemId()
				// A catch-up goes a minute below what is known; who came without an id wants what comes.
				if !seen.add(id) || renewal && g.newerThan == 0 && id < g.begun {
					return nil
				}
				newest = max(newest, id)
				one.kind, one.data = "item", appendMessage(nil, kind.Item.ProtoReflect())
			}
			one.id = max(newest, g.from)
			select {
			case events <- one:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		newest = max(newest, g.from)
		switch {
		case errors.Is(ctx.Err(), context.DeadlineExceeded):
			return newProblem(http.StatusUnauthorized, "TOKEN_EXPIRED", "The token has expired.")
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, io.EOF) && time.Since(opened) > retryMost:
			continue
		case errors.Is(err, io.EOF): // It is about to stop.
			err = status.Error(codes.Unavailable, "ended at once")
		case begunAlready || !isPassing(err, renewal):
			return fromStatus(err, func(name string) string { return name })
		}
		// Before and between streams the service may restart, which isn't the client's business.
		if failing.IsZero() {
			failing = time.Now()
		}
		if time.Since(failing) > patience {
			return fromStatus(err, func(name string) string { return name })
		}
		select {
		case <-time.After(retryMost):
		case <-ctx.Done():
		}
	}
}

// isPassing: waiting may help. A place that one's last stream still holds will be free.
func isPassing(err error, renewal bool) bool {
	code := status.Code(err)
	return code == codes.Unavailable || code == codes.Canceled || renewal && code == codes.ResourceExhausted
}

// watch takes the messages of one stream; io.EOF is its proper end. One that is silent counts as unavailable.
func (g *watching) watch(ctx context.Context, newest uint64, take func(*timelinev1.WatchHomeTimelineResponse) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	bearer, err := g.edge.identity.internal(g.subject, time.Now())
	if err != nil {
		return err
	}
	silence := time.AfterFunc(silenceMax, cancel)
	defer silence.Stop()
	stub := timelinev1.NewTimelineServiceClient(g.edge.to.timeline)
	stream, err := stub.WatchHomeTimeline(outgoing(ctx, bearer, g.trace), &timelinev1.WatchHomeTimelineRequest{NewerThanId: newest})
	if err != nil {
		return err
	}
	for {
		message, err := stream.Recv()
		if err != nil {
			return err
		}
		silence.Stop() // What the client doesn't take is no silence of the service.
		if err := take(message); err != nil {
			return err
		}
		silence.Reset(silenceMax)
	}
}

// firstIDOf is the smallest id of a moment.
func firstIDOf(moment time.Time) uint64 {
	return uint64(max(0, moment.UnixMilli()-epochMS)) << 22
}

// recent remembers the last ids.
type recent struct {
	known map[uint64]struct{}
	ring  []uint64
	next  int
}

func newRecent(size int) *recent {
	return &recent{known: make(map[uint64]struct{}), ring: make([]uint64, size)}
}

// add is false for one that is known.
func (r *recent) add(id uint64) bool {
	if _, known := r.known[id]; known {
		return false
	}
	delete(r.known, r.ring[r.next])
	r.ring[r.next] = id
	r.known[id] = struct{}{}
	r.next = (r.next + 1) % len(r.ring)
	return true
}

// sseSink writes server-sent events.
type sseSink struct {
	w       http.ResponseWriter
	control *http.ResponseController
}

func (s *sseSink) open() error {
	header := s.w.Header()
	header.Set("Content-Type", "text/event-stream")
	header.Set("Cache-Control", "no-store")
	header.Set("X-Accel-Buffering", "no")
	if err := s.control.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	s.w.WriteHeader(http.StatusOK)
	return s.write(fmt.Sprintf("retry: %d\n\n", retryAfterMS))
}

func (s *sseSink) send(one event) error {
	return s.write(fmt.Sprintf("id: %d\nevent: %s\ndata: %s\n\n", one.id, one.kind, one.data))
}

func (s *sseSink) close(p *problem) {
	_ = s.write(fmt.Sprintf("event: error\ndata: %s\n\n", strings.TrimSpace(string(p.json()))))
}

func (s *sseSink) write(text string) error {
	if err := s.control.SetWriteDeadline(time.Now().Add(writeWithin)); err != nil {
		return err
	}
	if _, err := io.WriteString(s.w, text); err != nil {
		return err
	}
	return s.control.Flush()
}

// socketSink writes text frames.
type socketSink struct {
	w    http.ResponseWriter
	r    *http.Request
	gone context.CancelFunc
	conn *websocket.Conn
}

type frame struct {
	Type string          `json:"type"`
	ID   string          `json:"id,omitempty"`
	Data json.RawMessage `json:"data"`
}

func (s *socketSink) open() error {
	// The origin was checked before.
	options := &websocket.AcceptOptions{Subprotocols: []string{streamProtocol}, InsecureSkipVerify: true}
	conn, err := websocket.Accept(s.w, s.r, options)
	if err != nil {
		return err
	}
	s.conn = conn
	reading := conn.CloseRead(s.r.Context()) // Clients have nothing to say; a frame ends it, as does going away.
	context.AfterFunc(reading, s.gone)
	return nil
}

func (s *socketSink) send(one event) error {
	return s.write(frame{one.kind, strconv.FormatUint(one.id, 10), one.data})
}

func (s *socketSink) close(p *problem) {
	_ = s.write(frame{Type: "error", Data: p.json()})
	code := websocket.StatusTryAgainLater
	if p.Status == http.StatusUnauthorized {
		code = websocket.StatusPolicyViolation
	}
	_ = s.conn.Close(code, p.Reason)
}

func (s *socketSink) write(one frame) error {
	text, err := json.Marshal(one)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(s.r.Context(), writeWithin)
	defer cancel()
	return s.conn.Write(ctx, websocket.MessageText, text)
}

// checkOrigin refuses pages of elsewhere: a browser lets them open WebSockets to anywhere.
func (e *edge) checkOrigin(r *http.Request) *problem {
	origin := r.Header.Get("Origin")
	if origin == "" || slices.Contains(e.config.corsOrigins, origin) {
		return nil
	}
	if parsed, err := url.Parse(origin); err == nil && strings.EqualFold(parsed.Host, r.Host) {
		return nil
	}
	return newProblem(http.StatusForbidden, "ORIGIN_NOT_ALLOWED", "Pages of this origin may not connect.")
}

func isWebSocket(r *http.Request) bool {
	return strings.EqualFold(r.Header.Get("Upgrade"), "websocket")
}

// subprotocols are those that a WebSocket's client offers.
func subprotocols(r *http.Request) []string {
	var offered []string
	for _, header := range r.Header.Values("Sec-WebSocket-Protocol") {
		for one := range strings.SplitSeq(header, ",") {
			offered = append(offered, strings.TrimSpace(one))
		}
	}
	return offered
}
