package main

import (
	"context"
	_ "embed"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	valkeyTimeout = 100 * time.Millisecond
	valkeyPause   = 500 * time.Millisecond // after a failure Valkey isn't asked for so long
	inHandMargin  = 5 * time.Second        // an edge that died keeps an idempotency key so much longer than a call lasts
)

//go:embed take.lua
var takeScript string

// shared is what several edges keep together in Valkey: token buckets, and idempotency keys in hand. Where Valkey is
// away both let everything pass: nothing but the gate of each edge then bounds the load, and tweet_svc still posts one
// tweet for one key.
type shared struct {
	client redis.UniversalClient
	prefix string
	script *redis.Script
	pause  atomic.Int64 // Unix ns until which Valkey isn't asked
}

// newShared connects when first used. `url`: as services have it, redis://, rediss://, unix:// or valkey-cluster://.
func newShared(url, prefix string) (*shared, error) {
	client, err := valkeyClient(url)
	return &shared{client: client, prefix: prefix, script: redis.NewScript(takeScript)}, err
}

func valkeyClient(url string) (redis.UniversalClient, error) {
	cluster, isCluster := strings.CutPrefix(url, "valkey-cluster://")
	if isCluster {
		url = "redis://" + strings.Split(cluster, ",")[0]
	}
	parsed, err := redis.ParseURL(url)
	if err != nil {
		return nil, fmt.Errorf("STARLING_VALKEY_URL: %w", err)
	}
	options := &redis.UniversalOptions{
		Addrs:    []string{parsed.Addr},
		Username: parsed.Username, Password: parsed.Password, DB: parsed.DB, TLSConfig: parsed.TLSConfig,
		DialTimeout: time.Second, ReadTimeout: valkeyTimeout, WriteTimeout: valkeyTimeout,
		ContextTimeoutEnabled: true, MaxRetries: -1, MaxRedirects: 3, PoolSize: 16, DisableIdentity: true,
	}
	if isCluster {
		nodes := cluster[strings.LastIndex(cluster, "@")+1:]
		options.Addrs, options.IsClusterMode = strings.Split(nodes, ","), true
	} else if parsed.Network == "unix" {
		return redis.NewClient(&redis.Options{
			Network: "unix", Addr: parsed.Addr, DB: parsed.DB, ReadTimeout: valkeyTimeout, WriteTimeout: valkeyTimeout,
			ContextTimeoutEnabled: true, MaxRetries: -1, PoolSize: 16, DisableIdentity: true,
		}), nil
	}
	return redis.NewUniversalClient(options), nil
}

// paused says whether Valkey isn't to be asked now.
func (s *shared) paused() bool { return time.Now().UnixNano() < s.pause.Load() }

func (s *shared) failed(err error) {
	if s.pause.Swap(time.Now().Add(valkeyPause).UnixNano()) < time.Now().Add(-10*time.Second).UnixNano() {
		slog.Warn("Valkey doesn't answer: limits aren't kept", "error", err)
	}
}

// taken is what became of one request at one bucket.
type taken struct {
	allowed   bool
	limit     int
	remaining int
	reset     time.Duration // until the bucket is full
	retry     time.Duration // until one more is there, if none was
}

// take takes one token from each bucket; buckets are named and have their allowances. Nil: limits aren't kept now.
func (s *shared) take(ctx context.Context, names []string, of []allowance) []taken {
	if s.paused() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, valkeyTimeout)
	defer cancel()
	results, err := s.run(ctx, names, of)
	if err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") {
		if err = s.load(ctx); err == nil {
			results, err = s.run(ctx, names, of)
		}
	}
	if err != nil {
		if context.Cause(ctx) != context.Canceled {
			s.failed(err)
		}
		return nil
	}
	return results
}

// load makes the script known, on every master of a cluster.
func (s *shared) load(ctx context.Context) error {
	if cluster, ok := s.client.(*redis.ClusterClient); ok {
		return cluster.ForEachMaster(ctx, func(ctx context.Context, master *redis.Client) error {
			return s.script.Load(ctx, master).Err()
		})
	}
	return s.script.Load(ctx, s.client).Err()
}

// run asks for all buckets in one round trip.
func (s *shared) run(ctx context.Context, names []string, of []allowance) ([]taken, error) {
	commands := make([]*redis.Cmd, len(names))
	_, err := s.client.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, name := range names {
			interval := 1e6 / of[i].perSecond
			commands[i] = pipe.EvalSha(ctx, s.script.Hash(), []string{s.prefix + "edge:" + name}, interval, of[i].burst)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	results := make([]taken, len(names))
	for i, command := range commands {
		said, err := command.Int64Slice()
		if err != nil || len(said) != 3 {
			return nil, fmt.Errorf("a bucket's answer: %v: %w", said, err)
		}
		interval := 1e6 / of[i].perSecond
		full := time.Duration(said[1]) * time.Microsecond
		results[i] = taken{
			allowed: said[0] == 1, limit: of[i].burst, reset: full, retry: time.Duration(said[2]) * time.Microsecond,
			remaining: max(0, of[i].burst-int(math.Ceil(float64(said[1])/interval))),
		}
	}
	return results, nil
}

// hold takes a name for some time, and is false if another has it. Without Valkey everybody has it.
func (s *shared) hold(ctx context.Context, name string, lifetime time.Duration) bool {
	if s.paused() {
		return true
	}
	// A client that goes says nothing of Valkey.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), valkeyTimeout)
	defer cancel()
	held, err := s.client.SetNX(ctx, s.prefix+"edge:"+name, "", lifetime).Result()
	if err != nil {
		s.failed(err)
		return true
	}
	return held
}

// release gives a name back, also when the request has been given up, and while Valkey isn't asked otherwise: a hold
// whose answer came too late may stand.
func (s *shared) release(name string) {
	ctx, cancel := context.WithTimeout(context.Background(), valkeyTimeout)
	defer cancel()
	if err := s.client.Del(ctx, s.prefix+"edge:"+name).Err(); err != nil {
		s.failed(err)
	}
}

// limit takes a token of the address's bucket and, if the caller is known, of the user's. It sets the headers of the
// tighter one, and says how a request without a token is refused.
func (e *edge) limit(w http.ResponseWriter, r *http.Request, subject string) *problem {
	var names []string
	var of []allowance
	if e.config.perAddress.perSecond > 0 {
		names, of = append(names, "address:"+e.addressOf(r)), append(of, e.config.perAddress)
	}
	if subject != "" && e.config.perUser.perSecond > 0 {
		names, of = append(names, "user:{"+subject+"}"), append(of, e.config.perUser)
	}
	if len(names) == 0 {
		return nil
	}
	var tight *taken
	results := e.shared.take(r.Context(), names, of)
	for i := range results {
		if tight == nil || results[i].tighter(*tight) {
			tight = &results[i]
		}
	}
	if tight == nil {
		return nil
	}
	header := w.Header()
	header.Set("RateLimit-Limit", strconv.Itoa(tight.limit))
	header.Set("RateLimit-Remaining", strconv.Itoa(tight.remaining))
	header.Set("RateLimit-Reset", strconv.Itoa(int(math.Ceil(tight.reset.Seconds()))))
	if tight.allowed {
		return nil
	}
	p := newProblem(http.StatusTooManyRequests, "RATE_LIMITED", "Too many requests; wait a moment.")
	p.retryAfter = max(tight.retry, time.Millisecond)
	return p
}

func (t taken) tighter(than taken) bool {
	if t.allowed != than.allowed {
		return !t.allowed
	}
	return t.remaining < than.remaining
}

// addressOf is where a request comes from: the peer, or what a trusted balancer says last.
func (e *edge) addressOf(r *http.Request) string {
	if e.config.addressHeader != "" {
		parts := strings.Split(r.Header.Get(e.config.addressHeader), ",")
		if last := strings.TrimSpace(parts[len(parts)-1]); net.ParseIP(last) != nil {
			return network(last)
		}
	}
	host, _, _ := net.SplitHostPort(r.RemoteAddr)
	return network(host)
}

// network is whom an address is of: itself, but one household has a /64 of IPv6.
func network(address string) string {
	parsed, err := netip.ParseAddr(address)
	if err != nil || parsed.Unmap().Is4() {
		return address
	}
	household, err := parsed.WithZone("").Prefix(64)
	if err != nil {
		return address
	}
	return household.String()
}
