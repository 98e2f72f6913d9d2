package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

func TestAPlaceInJSONHasItsField(t *testing.T) {
	body := `{"text": "a", "list": ["b", {"in": 1}], "last": null}`
	for at, want := range map[string]string{`"a"`: "text", `"b"`: "list[0]", `1}`: "list[1].in", `null`: "last"} {
		if got := fieldAt([]byte(body), strings.Index(body, at)); got != want {
			t.Errorf("at %s: %q, should be %q", at, got, want)
		}
	}
}

func TestBadBodiesNameTheirFieldAndGoodOnesPass(t *testing.T) {
	for body, want := range map[string]string{
		`{"text":"\ud83d"}`: "text", `{"text":"\ude00\ud83d"}`: "text", `{"a":"b","text":"x\ud83dy"}`: "text",
		"{\"text\":\"\xff\xfe\"}": "text", `{"mediaIds":["a","` + "\xc3" + `"]}`: "mediaIds[1]",
		`{"text":"a"`: "text", `{"text":"a"} {"text":"b"}`: "", `[]`: "", `null`: "", ``: "", ` `: "", `"text"`: "",
		`{"text":"\ud83d\ude00"}`: "ok", `{"text":"\\ud83d"}`: "ok", ` {"text": "a"} `: "ok", `{}`: "ok",
	} {
		refused := checkJSON([]byte(body))
		switch {
		case refused == nil:
			if want != "ok" {
				t.Errorf("%q passes", body)
			}
		case refused.Status != 400 || len(refused.Fields) != 1 || refused.Fields[0].Field != want:
			t.Errorf("%q: %+v", body, refused)
		}
	}
}

func TestRoutesAreThoseOfTheProtos(t *testing.T) {
	all := annotatedRoutes()
	for _, c := range []struct{ method, path, want string }{
		{"GET", "/api/v1/users/by-handle/followers", "GetUser"},
		{"GET", "/api/v1/users/5/followers", "ListFollowers"},
		{"PATCH", "/api/v1/tweets/5", "UpdateTweet"},
		{"GET", "/api/v1/tweets", "BatchGetTweets"},
	} {
		found, _, _ := all.find(c.method, c.path)
		if found == nil || string(found.rpc.Name()) != c.want {
			t.Errorf("%s %s: %+v", c.method, c.path, found)
		}
	}
	if _, _, allowed := all.find("PUT", "/api/v1/tweets/5"); len(allowed) != 3 {
		t.Error(allowed)
	}
	if found, _, allowed := all.find("GET", "/api/v1/tweets//likes"); found != nil || allowed != nil {
		t.Error(found, allowed)
	}
}

func TestParametersAreDecimalKnownAndOnce(t *testing.T) {
	all := annotatedRoutes()
	home, _, _ := all.find("GET", "/api/v1/timeline/home")
	tweets, _, _ := all.find("GET", "/api/v1/tweets")
	edit, variables, _ := all.find("PATCH", "/api/v1/tweets/5")
	for _, c := range []struct {
		of   *route
		raw  string
		want string
	}{
		{home, "limit=5&newerThanId=18446744073709551615", ""},
		{home, "limit=05", "limit"}, {home, "limit=1e1", "limit"}, {home, "limit=4294967296", "limit"},
		{home, "limit=1&limit=2", "limit"}, {home, "newerThanId=-1", "newerThanId"}, {home, "newerThanId=0x10", "newerThanId"},
		{home, "newerThanId=18446744073709551616", "newerThanId"}, {home, "nope=1", "nope"}, {home, "page_size=1", "page_size"},
		{home, "cursor=%ff", "cursor"},
		{tweets, "tweetIds=1&tweetIds=2", ""}, {tweets, "tweetIds=1,2", "tweetIds"},
		{edit, "updateMask=text", ""}, {edit, "tweet=1", "tweet"}, {edit, "tweet.text=1", "tweet.text"},
	} {
		refused := c.of.checkQuery(c.raw, variables)
		got := ""
		if refused != nil {
			got = refused.Fields[0].Field
		}
		if got != c.want {
			t.Errorf("%s: %q, should be %q", c.raw, got, c.want)
		}
	}
	if refused := edit.checkPath(map[string]string{"tweet.tweet_id": "010"}); refused == nil || refused.Fields[0].Field != "tweetId" {
		t.Error(refused)
	}
}

func TestStatusesAndFieldsAreTranslated(t *testing.T) {
	edit, _, _ := annotatedRoutes().find("PATCH", "/api/v1/tweets/5")
	home, _, _ := annotatedRoutes().find("GET", "/api/v1/timeline/home")
	for _, c := range []struct {
		code   codes.Code
		reason string
		want   int
	}{
		{codes.InvalidArgument, "TEXT_INVALID", 400}, {codes.InvalidArgument, "REQUEST_ID_REUSED", 422},
		{codes.Unauthenticated, "X", 401}, {codes.PermissionDenied, "BLOCKED", 403}, {codes.NotFound, "X", 404},
		{codes.AlreadyExists, "HANDLE_TAKEN", 409}, {codes.FailedPrecondition, "FOLLOW_LIMIT_REACHED", 409},
		{codes.FailedPrecondition, "VERSION_MISMATCH", 412}, {codes.ResourceExhausted, "WATCHES_FULL", 429},
		{codes.ResourceExhausted, "OVERLOADED", 503}, {codes.Unavailable, "X", 503}, {codes.DeadlineExceeded, "X", 504},
		{codes.Internal, "X", 500}, {codes.Unknown, "X", 500},
	} {
		said, err := status.New(c.code, "words").WithDetails(
			&errdetails.ErrorInfo{Reason: c.reason},
			&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: "tweet.text", Description: "bad"}}},
			&errdetails.RetryInfo{RetryDelay: durationpb.New(1500 * time.Millisecond)},
		)
		if err != nil {
			t.Fatal(err)
		}
		p := fromStatus(said.Err(), edit.jsonName)
		if p.Status != c.want {
			t.Errorf("%v %s: %d, should be %d", c.code, c.reason, p.Status, c.want)
		}
		if c.want < 500 && (p.Reason != c.reason || p.Fields[0].Field != "text") {
			t.Errorf("%v: %+v", c.code, p)
		}
		answer := httptest.NewRecorder()
		p.send(answer)
		if c.want == 429 && answer.Header().Get("Retry-After") != "2" {
			t.Error(answer.Header())
		}
	}
	for path, want := range map[string]string{"page_size": "limit", "page_token": "cursor", "what": "what", "tweet_ids[3]": "tweet_ids[3]"} {
		if got := home.jsonName(path); got != want {
			t.Errorf("%s: %s", path, got)
		}
	}
}

func TestWhatTheConnectionSaysStaysInside(t *testing.T) {
	p := fromStatus(status.Error(codes.Unavailable, "dial tcp 127.0.0.1:5: connection refused"), func(n string) string { return n })
	if p.Status != http.StatusServiceUnavailable || strings.Contains(p.Detail, "127.0.0.1") {
		t.Errorf("%+v", p)
	}
}

func TestAnOutageIsOneThatLasts(t *testing.T) {
	away := &outages{known: map[string]outage{}}
	start := time.Now()
	for _, one := range []struct {
		after   time.Duration
		failed  bool
		tooLong bool
	}{
		{0, true, false}, {6 * time.Second, true, false}, {12 * time.Second, true, true},
		{13 * time.Second, false, false}, {14 * time.Second, true, false},
		{time.Hour, true, false}, // Of another restart.
	} {
		if got := away.note("m", one.failed, start.Add(one.after)); got != one.tooLong {
			t.Errorf("after %s: %v", one.after, got)
		}
	}
}

func TestKeysBecomeRequestIDs(t *testing.T) {
	if id, _ := requestIDOf("A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"); id != "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11" {
		t.Error(id)
	}
	bare, _ := requestIDOf("order-7")
	quoted, _ := requestIDOf(`"order-7"`)
	other, _ := requestIDOf("order-8")
	if bare != quoted || bare == other || !uuidText.MatchString(bare) {
		t.Error(bare, quoted, other)
	}
	for _, key := range []string{`""`, "a b", "ü", strings.Repeat("k", 256)} {
		if _, refused := requestIDOf(key); refused == nil || refused.Fields[0].Field != "Idempotency-Key" {
			t.Errorf("%q passes", key)
		}
	}
}

func TestConfigurationNamesWhatIsWrong(t *testing.T) {
	good := map[string]string{
		"STARLING_AUTH_SECRET": secret, "STARLING_GRAPH_TARGET": "a:1", "STARLING_TWEET_TARGET": "a:1",
		"STARLING_TIMELINE_TARGET": "a:1", "STARLING_FANOUT_TARGETS": "a:1",
	}
	for _, c := range []struct {
		variables map[string]string
		want      string
	}{
		{nil, ""},
		{map[string]string{"STARLING_LISTEN": "0.0.0.0:80"}, "STARLING_EDGE_JWKS_URL"},
		{map[string]string{"STARLING_LISTEN": ":80"}, "STARLING_EDGE_JWKS_URL"},
		{map[string]string{"STARLING_LISTEN": "[::1]:80"}, ""},
		{map[string]string{"STARLING_EDGE_JWKS_URL": "https://id.example/keys", "STARLING_EDGE_AUDIENCE": "a"}, "STARLING_EDGE_ISSUER"},
		{map[string]string{"STARLING_AUTH_SECRET": "short"}, "STARLING_AUTH_SECRET"},
		{map[string]string{"STARLING_EDGE_TIMEOUT_SECONDS": "NaN"}, "STARLING_EDGE_TIMEOUT_SECONDS"},
		{map[string]string{"STARLING_EDGE_CALLS_MAX": "many"}, "STARLING_EDGE_CALLS_MAX"},
		{map[string]string{"STARLING_TWEET_TARGET": ""}, "STARLING_TWEET_TARGET"},
	} {
		_, wrong := loadConfig(func(name string) string {
			if value, given := c.variables[name]; given {
				return value
			}
			return good[name]
		})
		if (c.want == "") != (len(wrong) == 0) || c.want != "" && !strings.Contains(wrong[0], c.want) {
			t.Errorf("%v: %v", c.variables, wrong)
		}
	}
}

func TestTheDocumentHasAllRoutes(t *testing.T) {
	text := string(document(annotatedRoutes()))
	for _, path := range []string{`"/api/v1/tweets/{tweetId}"`, `"/api/v1/me"`, `"/api/v1/timeline/home/stream"`, `"/api/v1/follows/{targetId}"`} {
		if !strings.Contains(text, path) {
			t.Errorf("%s isn't there", path)
		}
	}
	if strings.Contains(text, "tweet.tweetId") || strings.Contains(text, "#/definitions/") {
		t.Error("something of the generated document shows")
	}
}

func TestAddressesOfOneHouseholdAreOne(t *testing.T) {
	for address, want := range map[string]string{"10.0.0.1": "10.0.0.1", "2001:db8::5": "2001:db8::/64", "::ffff:10.0.0.1": "::ffff:10.0.0.1"} {
		if got := network(address); got != want {
			t.Errorf("%s: %s", address, got)
		}
	}
}
