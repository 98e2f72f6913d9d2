package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/MicahParks/jwkset"
	"github.com/MicahParks/keyfunc/v3"
	"github.com/golang-jwt/jwt/v5"
	"golang.org/x/time/rate"
)

const (
	internalIssuer   = "starling" // as mesh/principals.py has it
	internalLifetime = 60 * time.Second
	internalRenewal  = 30 * time.Second
	tokenBytesMax    = 4096
	knownMax         = 10_000
	knownFor         = 30 * time.Second // so long a token whose key was withdrawn still passes
	leeway           = 5 * time.Second
	operator         = "operator"
	operatorScope    = "starling:operator"
	jwksRefresh      = 10 * time.Minute
	jwksUnknown      = 10 * time.Second
	jwksTimeout      = 5 * time.Second
	jwksBytesMax     = 1 << 20
)

// caller is a verified principal.
type caller struct {
	subject string // "user:<id>" or "operator"
	userID  string // decimal; "" for the operator
	expires time.Time
	bearer  string // "Bearer <token>" for the services, good for internalLifetime−internalRenewal at least
}

// identity verifies clients' tokens and makes those that services trust.
//
// With a JWKS the tokens are RS256 or ES256 and of the configured issuer and audience; without one (development) they
// are those that services take themselves, HS256 with the mesh's own secret.
type identity struct {
	secret    []byte
	keys      jwt.Keyfunc
	parser    *jwt.Parser
	userClaim string
	// Tokens are the mesh's own, and `sub` may be "operator".
	development bool
	now         func() time.Time

	mutex sync.Mutex
	known map[string]knownToken
}

type knownToken struct {
	caller caller
	until  time.Time
}

var errKeysAway = errors.New("the identity provider's keys can't be fetched")

// newIdentity also starts fetching the keys, until ctx ends.
func newIdentity(ctx context.Context, c config, now func() time.Time) (*identity, error) {
	id := &identity{secret: c.authSecret, userClaim: c.userClaim, now: now, known: map[string]knownToken{}}
	issuer, audience, algorithms := internalIssuer, internalIssuer, []string{"HS256"}
	if c.jwksURL == "" {
		id.keys = func(*jwt.Token) (any, error) { return c.authSecret, nil }
		id.userClaim, id.development = "sub", true
	} else {
		issuer, audience, algorithms = c.issuer, c.audience, []string{"RS256", "ES256"}
		keys, err := fetchedKeys(ctx, c.jwksURL)
		if err != nil {
			return nil, err
		}
		id.keys = keys
	}
	id.parser = jwt.NewParser(
		jwt.WithValidMethods(algorithms), jwt.WithIssuer(issuer), jwt.WithAudience(audience),
		jwt.WithExpirationRequired(), jwt.WithIssuedAt(), jwt.WithLeeway(leeway), jwt.WithTimeFunc(now),
	)
	return id, nil
}

// fetchedKeys follows a JWKS: fetched every jwksRefresh and, at most once in jwksUnknown, for a key id not known yet.
func fetchedKeys(ctx context.Context, url string) (jwt.Keyfunc, error) {
	noting := &notingTransport{}
	storage, err := jwkset.NewStorageFromHTTP(url, jwkset.HTTPClientStorageOptions{
		Client:                    &http.Client{Timeout: jwksTimeout, Transport: noting},
		Ctx:                       ctx,
		HTTPTimeout:               jwksTimeout,
		NoErrorReturnFirstHTTPReq: true,
		RefreshInterval:           jwksRefresh,
		RefreshErrorHandler: func(_ context.Context, err error) {
			slog.Warn("the identity provider's keys can't be fetched", "error", err)
		},
	})
	if err != nil {
		return nil, err
	}
	client, err := jwkset.NewHTTPClient(jwkset.HTTPClientOptions{
		HTTPURLs:          map[string]jwkset.Storage{url: storage},
		RateLimitWaitMax:  100 * time.Millisecond,
		RefreshUnknownKID: rate.NewLimiter(rate.Every(jwksUnknown), 1),
	})
	if err != nil {
		return nil, err
	}
	functions, err := keyfunc.New(keyfunc.Options{Ctx: ctx, Storage: client})
	if err != nil {
		return nil, err
	}
	return func(token *jwt.Token) (any, error) {
		key, err := functions.Keyfunc(token)
		if err != nil && noting.away.Load() {
			return nil, errKeysAway
		}
		return key, err
	}, nil
}

// notingTransport bounds what is fetched, and remembers whether the last fetch failed.
type notingTransport struct{ away atomic.Bool }

func (t *notingTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := http.DefaultTransport.RoundTrip(request)
	t.away.Store(err != nil || response.StatusCode != http.StatusOK)
	if err == nil {
		response.Body = http.MaxBytesReader(nil, response.Body, jwksBytesMax)
	}
	return response, err
}

// bearerOf gives the token of a request, from its header or, for a WebSocket of a browser, its subprotocols.
func bearerOf(r *http.Request) (string, *problem) {
	if header := r.Header.Get("Authorization"); header != "" {
		scheme, token, _ := strings.Cut(header, " ")
		if !strings.EqualFold(scheme, "Bearer") || token == "" || len(token) > tokenBytesMax {
			return "", newProblem(401, "TOKEN_INVALID", "The Authorization header isn't 'Bearer <token>'.")
		}
		return token, nil
	}
	if isWebSocket(r) {
		for _, offered := range subprotocols(r) {
			if token, found := strings.CutPrefix(offered, bearerProtocol); found && len(token) <= tokenBytesMax {
				return token, nil
			}
		}
	}
	return "", newProblem(401, "UNAUTHENTICATED", "No token: send the header 'Authorization: Bearer <token>'.")
}

// verify gives the caller whose token this is.
func (id *identity) verify(token string) (caller, *problem) {
	now := id.now()
	id.mutex.Lock()
	known, found := id.known[token]
	id.mutex.Unlock()
	if found && now.Before(known.until) {
		return known.caller, nil
	}
	who, refused := id.parse(token)
	if refused != nil {
		return caller{}, refused
	}
	bearer, err := id.internal(who.subject, now)
	if err != nil {
		return caller{}, newProblem(500, "INTERNAL", "Something went wrong here; it is in the logs.")
	}
	who.bearer = bearer
	until := now.Add(min(knownFor, internalRenewal))
	if who.expires.Before(until) {
		until = who.expires
	}
	id.mutex.Lock()
	defer id.mutex.Unlock()
	if len(id.known) >= knownMax {
		clear(id.known)
	}
	id.known[token] = knownToken{who, until}
	return who, nil
}

func (id *identity) parse(token string) (caller, *problem) {
	claims := jwt.MapClaims{}
	_, err := id.parser.ParseWithClaims(token, claims, id.keys)
	switch {
	case errors.Is(err, errKeysAway):
		return caller{}, newProblem(503, "KEYS_UNAVAILABLE", "The identity provider doesn't answer, so the token can't be verified now.")
	case errors.Is(err, jwt.ErrTokenExpired):
		return caller{}, newProblem(401, "TOKEN_EXPIRED", "The token has expired.")
	case err != nil:
		return caller{}, newProblem(401, "TOKEN_INVALID", "The token isn't valid.")
	}
	expires, err := claims.GetExpirationTime()
	if err != nil || expires == nil {
		return caller{}, newProblem(401, "TOKEN_INVALID", "The token isn't valid.")
	}
	subject, ok := id.subjectOf(claims)
	if !ok {
		return caller{}, newProblem(401, "TOKEN_INVALID", "The token names no principal that we know.")
	}
	userID, _ := strings.CutPrefix(subject, "user:")
	if subject == operator {
		userID = ""
	}
	return caller{subject: subject, userID: userID, expires: expires.Time}, nil
}

// subjectOf gives the principal: the operator by a scope, else a user by the configured claim, decimal or "user:<id>".
// Services have no business here.
func (id *identity) subjectOf(claims jwt.MapClaims) (string, bool) {
	scope, _ := claims["scope"].(string)
	for one := range strings.FieldsSeq(scope) {
		if one == operatorScope {
			return operator, true
		}
	}
	claim, _ := claims[id.userClaim].(string)
	if claim == operator && id.development {
		return claim, true
	}
	text := strings.TrimPrefix(claim, "user:")
	number, err := strconv.ParseUint(text, 10, 64)
	// "007" is somebody else's name than "7".
	if err != nil || number == 0 || strconv.FormatUint(number, 10) != text {
		return "", false
	}
	return "user:" + text, true
}

// internal makes the token that services trust.
func (id *identity) internal(subject string, now time.Time) (string, error) {
	claims := jwt.MapClaims{
		"sub": subject, "iss": internalIssuer, "aud": internalIssuer,
		"iat": now.Unix(), "exp": now.Add(internalLifetime).Unix(),
	}
	signed, err := jwt.NewWithClaims(jwt.SigningMethodHS256, claims).SignedString(id.secret)
	if err != nil {
		return "", fmt.Errorf("sign: %w", err)
	}
	return "Bearer " + signed, nil
}
