package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	tweetv1 "starling/edge/gen/starling/tweet/v1"
)

const keyBytesMax = 255

var (
	uuidText = regexp.MustCompile(`^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$`)
	keyText  = regexp.MustCompile(`^[\x21\x23-\x5b\x5d-\x7e]+$`)
)

// requestIDOf makes an Idempotency-Key into the UUID that tweet_svc wants: itself if it is one, else one of its hash.
// The IETF draft has keys in quotes; both forms are taken.
func requestIDOf(key string) (string, *problem) {
	if len(key) >= 2 && key[0] == '"' && key[len(key)-1] == '"' {
		key = key[1 : len(key)-1]
	}
	if len(key) > keyBytesMax || !keyText.MatchString(key) {
		return "", badField("INVALID_ARGUMENT", "Idempotency-Key", "Should be 1 to 255 visible ASCII characters.")
	}
	if uuidText.MatchString(key) {
		return strings.ToLower(key), nil
	}
	sum := sha256.Sum256([]byte(key))
	return uuid([16]byte(sum[:16])), nil
}

func uuid(of [16]byte) string {
	of[6], of[8] = of[6]&0x0f|0x80, of[8]&0x3f|0x80 // Version 8: made as the maker likes.
	text := hex.EncodeToString(of[:])
	return fmt.Sprintf("%s-%s-%s-%s-%s", text[:8], text[8:12], text[12:16], text[16:20], text[20:])
}

// withHeaders gives calls what came in a request's headers: an edit its version, and a post its request id, so that it
// may be tried again: the key's, the body's, or a new one.
func withHeaders(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	if edit, ok := request.(*tweetv1.UpdateTweetRequest); ok && edit.ExpectedVersion == 0 {
		edit.ExpectedVersion = exchangeOf(ctx).ifVersion
	}
	if post, ok := request.(*tweetv1.CreateTweetRequest); ok {
		if key := exchangeOf(ctx).requestID; key != "" {
			post.RequestId = key
		} else if post.RequestId == "" {
			var random [16]byte
			_, _ = rand.Read(random[:])
			post.RequestId = uuid(random)
		}
	}
	return invoke(ctx, method, request, reply, conn, options...)
}

// keysInHand are the idempotency keys of requests that run in this process.
type keysInHand struct {
	mutex sync.Mutex
	known map[string]struct{}
}

// takeKey refuses a key whose first request still runs, here or at another edge.
func (e *edge) takeKey(ctx context.Context, subject, requestID string) *problem {
	inUse := newProblem(http.StatusConflict, "IDEMPOTENCY_KEY_IN_USE", "A request with this key is still running.")
	inUse.retryAfter = time.Second
	name := subject + ":" + requestID
	e.keys.mutex.Lock()
	_, known := e.keys.known[name]
	e.keys.known[name] = struct{}{}
	e.keys.mutex.Unlock()
	if known {
		return inUse
	}
	if !e.shared.hold(ctx, "key:"+name, e.config.timeout+inHandMargin) {
		e.forgetKey(name)
		return inUse
	}
	return nil
}

// releaseKey is for the one who took it.
func (e *edge) releaseKey(subject, requestID string) {
	name := subject + ":" + requestID
	e.shared.release("key:" + name)
	e.forgetKey(name)
}

func (e *edge) forgetKey(name string) {
	e.keys.mutex.Lock()
	defer e.keys.mutex.Unlock()
	delete(e.keys.known, name)
}
