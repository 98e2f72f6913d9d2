package main

import (
	"context"
	"errors"
	"net/http"
	"regexp"
	"strconv"
	"strings"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	fanoutv1 "starling/edge/gen/starling/fanout/v1"
	graphv1 "starling/edge/gen/starling/graph/v1"
	timelinev1 "starling/edge/gen/starling/timeline/v1"
	tweetv1 "starling/edge/gen/starling/tweet/v1"
)

const readYourWriteHeader = "Starling-Read-Your-Write"

// exchange is what the gateway's callbacks know of the request that they serve.
type exchange struct {
	route       *route
	body        []byte
	traceparent string
	requestID   string // of the Idempotency-Key; "": none
	ifVersion   uint32 // of If-Match; 0: none
	version     uint32 // of the tweet that was answered
}

type exchangeKey struct{}

func exchangeOf(ctx context.Context) *exchange {
	found, _ := ctx.Value(exchangeKey{}).(*exchange)
	if found == nil {
		panic("a gateway's call without its exchange")
	}
	return found
}

// connections to the services.
type connections struct {
	graph, tweet, timeline, fanout *grpc.ClientConn
}

// newGateway gives the handler that turns JSON into calls, by the protos' annotations. The request's context must have
// an exchange, and its Authorization header the token for the services.
func newGateway(ctx context.Context, to connections) (http.Handler, error) {
	mux := runtime.NewServeMux(
		runtime.WithMarshalerOption(runtime.MIMEWildcard, &plainJSON{}),
		runtime.WithIncomingHeaderMatcher(func(string) (string, bool) { return "", false }),
		runtime.WithOutgoingHeaderMatcher(func(string) (string, bool) { return "", false }),
		runtime.WithOutgoingTrailerMatcher(func(string) (string, bool) { return "", false }),
		runtime.WithMetadata(func(ctx context.Context, _ *http.Request) metadata.MD {
			return metadata.Pairs("traceparent", exchangeOf(ctx).traceparent)
		}),
		runtime.WithDisablePathLengthFallback(),
		runtime.WithDisableHTTPMethodOverride(),
		runtime.WithForwardResponseOption(decorate),
		runtime.WithErrorHandler(func(
			ctx context.Context, _ *runtime.ServeMux, _ runtime.Marshaler, w http.ResponseWriter, _ *http.Request, err error,
		) {
			exchangeOf(ctx).problemOf(err).send(w)
		}),
	)
	return mux, errors.Join(
		tweetv1.RegisterTweetServiceHandler(ctx, mux, to.tweet),
		graphv1.RegisterGraphServiceHandler(ctx, mux, to.graph),
		timelinev1.RegisterTimelineServiceHandler(ctx, mux, to.timeline),
		fanoutv1.RegisterFanoutServiceHandler(ctx, mux, to.fanout),
	)
}

// decorate sets what an answer has beside its body.
func decorate(ctx context.Context, w http.ResponseWriter, message proto.Message) error {
	if written, ok := message.(interface{ GetReadYourWriteToken() string }); ok && written.GetReadYourWriteToken() != "" {
		w.Header().Set(readYourWriteHeader, written.GetReadYourWriteToken())
	}
	if tweet := message.ProtoReflect().Descriptor().Fields().ByName("tweet"); tweet != nil {
		read, _ := message.(interface{ GetTweet() *tweetv1.Tweet })
		exchangeOf(ctx).version = read.GetTweet().GetVersion()
	}
	switch name := message.ProtoReflect().Descriptor().Name(); name {
	case "CreateTweetResponse", "RetweetResponse":
		tweet, _ := message.(interface{ GetTweet() *tweetv1.Tweet })
		w.Header().Set("Location", apiPrefix+"tweets/"+strconv.FormatUint(tweet.GetTweet().GetTweetId(), 10))
		w.WriteHeader(http.StatusCreated)
	case "CreateUserResponse":
		user, _ := message.(interface{ GetUser() *graphv1.User })
		w.Header().Set("Location", apiPrefix+"users/"+strconv.FormatUint(user.GetUser().GetUserId(), 10))
		w.WriteHeader(http.StatusCreated)
	case "DeleteTweetResponse":
		w.WriteHeader(http.StatusNoContent)
	}
	return nil
}

var (
	placed      = regexp.MustCompile(`\(line (\d+):(\d+)\): (.*)$`)
	unknownName = regexp.MustCompile(`unknown field "([^"]*)"`)
	ofParameter = regexp.MustCompile(`(?:parameter: |parsing (?:list|field) "|field ")([\w.]+)`)
)

// problemOf turns an error of the gateway or of a service into a problem.
func (x *exchange) problemOf(err error) *problem {
	p := fromStatus(err, func(path string) string {
		if path == "request_id" && x.requestID != "" {
			return "Idempotency-Key"
		}
		return x.route.jsonName(path)
	})
	if p.Status != http.StatusBadRequest || len(p.Fields) > 0 {
		return p
	}
	// The gateway's own words: about the body with a place in it, or about a parameter.
	if at := placed.FindStringSubmatch(p.Detail); at != nil {
		return x.badBody(at[1], at[2], at[3])
	}
	if at := ofParameter.FindStringSubmatch(p.Detail); at != nil {
		return badField("INVALID_ARGUMENT", x.route.jsonName(at[1]), "Not a value of its type.")
	}
	return badField("INVALID_ARGUMENT", "", "The request can't be read.")
}

func (x *exchange) badBody(line, column, words string) *problem {
	if unknown := unknownName.FindStringSubmatch(words); unknown != nil {
		return badField("UNKNOWN_FIELD", unknown[1], "There is no such field.")
	}
	name := fieldAt(x.body, offsetOf(x.body, line, column))
	description := "Not a value of its type."
	switch {
	case strings.Contains(words, "invalid escape"):
		description = "Not valid text: an escape sequence that stands for no character."
	case strings.Contains(words, "syntax error"), strings.Contains(words, "unexpected"):
		description = "Not valid JSON."
	case strings.Contains(words, "duplicate"):
		description = "It is there twice."
	}
	return badField("INVALID_ARGUMENT", name, description)
}
