package main

import (
	"context"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	patience            = 7 * time.Second  // how long a call is tried again: a restart takes about two, on a busy machine four
	forgetful           = 10 * time.Second // away for so long, a service isn't waited for any more
	patienceWithService = 2 * time.Second  // with one that answers, but lacks a store or another service
	retryFirst          = 50 * time.Millisecond
	retryMost           = 400 * time.Millisecond
	messageBytes        = 4 << 20
)

// A repeat of these may say something else than the lost answer: they are sent once.
var onlyOnce = map[string]bool{"/starling.graph.v1.GraphService/CreateUser": true}

// connect gives a connection to a service (`dns:///name:port` or `host:port`), made when first used, and again for ever.
func connect(target string) (*grpc.ClientConn, error) {
	if !strings.Contains(target, "://") {
		target = "dns:///" + target
	}
	away := &outages{known: map[string]outage{}}
	return grpc.NewClient(target,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithChainUnaryInterceptor(withHeaders, away.retrying),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 5 * time.Second}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: 2 * time.Second,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(messageBytes)),
		grpc.WithNoProxy(),
		grpc.WithIdleTimeout(0), // An idle connection would count as none in /readyz.
	)
}

// outages remembers since when each method of a service has failed.
type outages struct {
	mutex sync.Mutex
	known map[string]outage
}

type outage struct{ since, last time.Time }

// note takes in how a call ended, and says whether its method has failed for too long to be waited for.
func (o *outages) note(method string, failed bool, now time.Time) bool {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	if !failed {
		delete(o.known, method)
		return false
	}
	found, known := o.known[method]
	if !known || now.Sub(found.last) > forgetful {
		found.since = now
	}
	found.last = now
	o.known[method] = found
	return now.Sub(found.since) > forgetful
}

// retrying tries a call again while its service restarts. Every call but those of onlyOnce may be repeated: reads, and
// writes that change nothing the second time or carry a request id.
func (o *outages) retrying(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	began := time.Now()
	end := began.Add(patience)
	delay := retryFirst
	for {
		err := invoke(ctx, method, request, reply, conn, options...)
		// gRPC's core says CANCELLED of calls that a stopping server hadn't looked at (grpc/grpc#41785).
		code := status.Code(err)
		if ctx.Err() != nil {
			return err // A caller that goes says nothing of the service.
		}
		away := code == codes.Unavailable || code == codes.Canceled
		tooLong := o.note(method, away, time.Now())
		if away && len(status.Convert(err).Details()) > 0 {
			// The service is there: what it lacks is what it has waited for itself.
			end = earlier(end, began.Add(patienceWithService))
		}
		if !away || tooLong || onlyOnce[method] || time.Now().Add(delay).After(end) {
			return err
		}
		select {
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-time.After(delay):
		}
		delay = min(2*delay, retryMost)
	}
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// outgoing has the metadata of a call made for a request: who it is for, and its trace.
func outgoing(ctx context.Context, bearer, traceparent string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "authorization", bearer, "traceparent", traceparent)
}

// ready says whether a connection is up, and has it made if it isn't.
func ready(conn *grpc.ClientConn) bool {
	state := conn.GetState()
	if state == connectivity.Idle {
		conn.Connect()
	}
	return state == connectivity.Ready
}
