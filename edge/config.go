package main

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

// config is what the edge is told by STARLING_* variables; seconds, bytes and counts say so in their names there.
type config struct {
	listen         string // host:port; port 0: any free one
	listenFD       int    // a listening socket to take over instead; -1: none
	addressFile    string // where to write the address served on; "": nowhere
	metricsListen  string // host:port of /metrics; "": none
	web            string // the folder of the web page
	graphTarget    string
	tweetTarget    string
	timelineTarget string
	fanoutTargets  []string
	valkeyURL      string
	keyPrefix      string
	authSecret     []byte // HMAC key of tokens for the services, and of development tokens
	jwksURL        string // "": development
	issuer         string
	audience       string
	userClaim      string
	corsOrigins    []string
	timeout        time.Duration // of a call without a deadline of its own, and the longest
	drainLeast     time.Duration // for balancers to notice that /readyz is 503
	drain          time.Duration // at most, for clients to let go of their connections
	grace          time.Duration
	bodyBytesMax   int64
	headerBytesMax int
	callsMax       int // in flight at once; more are refused with 503
	streamsMax     int
	perUser        allowance
	perAddress     allowance
	addressHeader  string // from a trusted balancer, such as X-Forwarded-For; "": the peer's address
	logRequests    bool
}

// allowance is a token bucket: burst tokens, refilled at perSecond. Zero perSecond: no limit.
type allowance struct {
	perSecond float64
	burst     int
}

// environment reads variables, and collects what is wrong with them.
type environment struct {
	get    func(string) string
	errors []string
}

const prefix = "STARLING_"

func (e *environment) wrong(name, format string, args ...any) {
	e.errors = append(e.errors, fmt.Sprintf("configuration: %s%s: %s", prefix, name, fmt.Sprintf(format, args...)))
}

func (e *environment) text(name, preset string) string {
	if value := e.get(prefix + name); value != "" {
		return value
	}
	return preset
}

func (e *environment) list(name string) []string {
	var parts []string
	for part := range strings.SplitSeq(e.text(name, ""), ",") {
		if part = strings.TrimSpace(part); part != "" {
			parts = append(parts, part)
		}
	}
	return parts
}

func (e *environment) number(name string, preset, least, most float64) float64 {
	value := e.text(name, "")
	if value == "" {
		return preset
	}
	number, err := strconv.ParseFloat(value, 64)
	if err != nil || !(number >= least && number <= most) {
		e.wrong(name, "should be a number from %g to %g", least, most)
		return preset
	}
	return number
}

func (e *environment) seconds(name string, preset, least, most float64) time.Duration {
	return time.Duration(e.number(name, preset, least, most) * float64(time.Second))
}

func (e *environment) needed(name string) string {
	value := e.text(name, "")
	if value == "" {
		e.wrong(name, "is needed")
	}
	return value
}

// loadConfig gives the configuration, or one line for each wrong variable.
func loadConfig(get func(string) string) (config, []string) {
	e := &environment{get: get}
	c := config{
		listen:         e.text("LISTEN", "127.0.0.1:0"),
		listenFD:       int(e.number("LISTEN_FD", -1, 3, 1<<20)),
		addressFile:    e.text("ADDRESS_FILE", ""),
		metricsListen:  e.text("EDGE_METRICS_LISTEN", ""),
		web:            e.text("EDGE_WEB", "web"),
		graphTarget:    e.needed("GRAPH_TARGET"),
		tweetTarget:    e.needed("TWEET_TARGET"),
		timelineTarget: e.needed("TIMELINE_TARGET"),
		fanoutTargets:  e.list("FANOUT_TARGETS"),
		valkeyURL:      e.text("VALKEY_URL", "redis://127.0.0.1:6379/0"),
		keyPrefix:      e.text("KEY_PREFIX", ""),
		authSecret:     []byte(e.needed("AUTH_SECRET")),
		jwksURL:        e.text("EDGE_JWKS_URL", ""),
		issuer:         e.text("EDGE_ISSUER", ""),
		audience:       e.text("EDGE_AUDIENCE", ""),
		userClaim:      e.text("EDGE_USER_CLAIM", "sub"),
		corsOrigins:    e.list("EDGE_CORS_ORIGINS"),
		timeout:        e.seconds("EDGE_TIMEOUT_SECONDS", 10, 0.1, 300),
		drain:          e.seconds("EDGE_DRAIN_SECONDS", 5, 0, 300),
		drainLeast:     e.seconds("DRAIN_SECONDS", 0.5, 0, 300),
		grace:          e.seconds("GRACE_SECONDS", 10, 0.1, 300),
		bodyBytesMax:   int64(e.number("EDGE_BODY_BYTES_MAX", 64<<10, 1<<10, 16<<20)),
		headerBytesMax: int(e.number("EDGE_HEADER_BYTES_MAX", 16<<10, 4<<10, 1<<20)),
		callsMax:       int(e.number("EDGE_CALLS_MAX", 512, 1, 100_000)),
		streamsMax:     int(e.number("EDGE_STREAMS_MAX", 2_000, 1, 1_000_000)),
		perUser:        e.rate("EDGE_USER", 100, 200),
		perAddress:     e.rate("EDGE_ADDRESS", 500, 1_000),
		addressHeader:  e.text("EDGE_ADDRESS_HEADER", ""),
		logRequests:    e.text("LOG_REQUESTS", "false") == "true",
	}
	if len(c.authSecret) > 0 && len(c.authSecret) < 32 {
		e.wrong("AUTH_SECRET", "needs at least 32 bytes")
	}
	if len(c.fanoutTargets) == 0 {
		e.wrong("FANOUT_TARGETS", "is needed")
	}
	if c.jwksURL != "" {
		if c.issuer == "" {
			e.wrong("EDGE_ISSUER", "is needed with STARLING_EDGE_JWKS_URL")
		}
		if c.audience == "" {
			e.wrong("EDGE_AUDIENCE", "is needed with STARLING_EDGE_JWKS_URL")
		}
	} else if c.listenFD < 0 && !isLoopback(c.listen) {
		e.wrong("EDGE_JWKS_URL", "is needed to listen on %s: development tokens are for loopback only", c.listen)
	}
	return c, e.errors
}

func (e *environment) rate(name string, perSecond float64, burst int) allowance {
	return allowance{
		perSecond: e.number(name+"_PER_SECOND", perSecond, 0, 1e6),
		burst:     int(e.number(name+"_BURST", float64(burst), 1, 1e6)),
	}
}

func isLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

func osEnvironment() (config, []string) { return loadConfig(os.Getenv) }
