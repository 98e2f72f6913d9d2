package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

const (
	secret = "a secret for tests that is long enough"
	issuer = "https://id.example"
)

// provider is an identity provider: a JWKS that can change, and go away.
type provider struct {
	server *httptest.Server
	keys   atomic.Value // []jwk
	away   atomic.Bool
}

type jwk map[string]string

func newProvider(t *testing.T) *provider {
	t.Helper()
	p := &provider{}
	p.keys.Store([]jwk{})
	p.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if p.away.Load() {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"keys": p.keys.Load()})
	}))
	t.Cleanup(p.server.Close)
	return p
}

func b64(bytes []byte) string { return base64.RawURLEncoding.EncodeToString(bytes) }

func rsaKey(t *testing.T, kid string) (*rsa.PrivateKey, jwk) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	return key, jwk{"kty": "RSA", "kid": kid, "alg": "RS256", "use": "sig", "n": b64(key.N.Bytes()), "e": "AQAB"}
}

func ecKey(t *testing.T, kid string) (*ecdsa.PrivateKey, jwk) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	point, err := key.PublicKey.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	return key, jwk{"kty": "EC", "crv": "P-256", "kid": kid, "alg": "ES256", "x": b64(point[1:33]), "y": b64(point[33:])}
}

// external verifies the provider's tokens.
func external(t *testing.T, p *provider) *identity {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	c := config{authSecret: []byte(secret), jwksURL: p.server.URL, issuer: issuer, audience: "api", userClaim: "sub"}
	id, err := newIdentity(ctx, c, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// claims are good ones, changed as the test wants.
func claims(changes jwt.MapClaims) jwt.MapClaims {
	now := time.Now()
	good := jwt.MapClaims{"sub": "42", "iss": issuer, "aud": "api", "iat": now.Unix(), "exp": now.Add(time.Minute).Unix()}
	for name, value := range changes {
		if value == nil {
			delete(good, name)
		} else {
			good[name] = value
		}
	}
	return good
}

func sign(t *testing.T, method jwt.SigningMethod, key any, kid string, of jwt.MapClaims) string {
	t.Helper()
	token := jwt.NewWithClaims(method, of)
	if kid != "" {
		token.Header["kid"] = kid
	}
	text, err := token.SignedString(key)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func reasonOf(id *identity, token string) (string, int) {
	who, refused := id.verify(token)
	if refused != nil {
		return refused.Reason, refused.Status
	}
	return who.subject, http.StatusOK
}

func TestOnlyGoodTokensOfTheProviderAreTaken(t *testing.T) {
	p := newProvider(t)
	key, public := rsaKey(t, "one")
	curve, curvePublic := ecKey(t, "two")
	p.keys.Store([]jwk{public, curvePublic, {"kty": "oct", "kid": "three", "k": b64([]byte(secret))}})
	id := external(t, p)
	pem, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	with := func(changes jwt.MapClaims) string {
		return sign(t, jwt.SigningMethodRS256, key, "one", claims(changes))
	}
	internal, err := id.internal("user:42", now)
	if err != nil {
		t.Fatal(err)
	}
	other, _ := rsaKey(t, "one")
	for _, c := range []struct{ name, token, want string }{
		{"RS256", with(nil), "user:42"},
		{"ES256", sign(t, jwt.SigningMethodES256, curve, "two", claims(nil)), "user:42"},
		{"a subject as services have it", with(jwt.MapClaims{"sub": "user:42"}), "user:42"},
		{"several audiences", with(jwt.MapClaims{"aud": []string{"other", "api"}}), "user:42"},
		{"an operator's scope", with(jwt.MapClaims{"scope": "openid starling:operator"}), "operator"},
		{"expired", with(jwt.MapClaims{"exp": now.Add(-time.Minute).Unix()}), "TOKEN_EXPIRED"},
		{"without an end", with(jwt.MapClaims{"exp": nil}), "TOKEN_INVALID"},
		{"not yet valid", with(jwt.MapClaims{"nbf": now.Add(time.Minute).Unix()}), "TOKEN_INVALID"},
		{"made in the future", with(jwt.MapClaims{"iat": now.Add(time.Minute).Unix()}), "TOKEN_INVALID"},
		{"of another issuer", with(jwt.MapClaims{"iss": "https://other.example"}), "TOKEN_INVALID"},
		{"for another audience", with(jwt.MapClaims{"aud": "other"}), "TOKEN_INVALID"},
		{"without an audience", with(jwt.MapClaims{"aud": nil}), "TOKEN_INVALID"},
		{"of nobody", with(jwt.MapClaims{"sub": nil}), "TOKEN_INVALID"},
		{"of user 0", with(jwt.MapClaims{"sub": "0"}), "TOKEN_INVALID"},
		{"of a number written otherwise", with(jwt.MapClaims{"sub": "user:0042"}), "TOKEN_INVALID"},
		{"of a service", with(jwt.MapClaims{"sub": "service:5"}), "TOKEN_INVALID"},
		{"of whom calls itself operator", with(jwt.MapClaims{"sub": "operator"}), "TOKEN_INVALID"},
		{"alg none", sign(t, jwt.SigningMethodNone, jwt.UnsafeAllowNoneSignatureType, "one", claims(nil)), "TOKEN_INVALID"},
		{"alg HS256 with the public key", sign(t, jwt.SigningMethodHS256, pem, "one", claims(nil)), "TOKEN_INVALID"},
		{"alg HS256 with a key of the set", sign(t, jwt.SigningMethodHS256, []byte(secret), "three", claims(nil)), "TOKEN_INVALID"},
		{"alg RS384", sign(t, jwt.SigningMethodRS384, key, "one", claims(nil)), "TOKEN_INVALID"},
		{"another's signature", sign(t, jwt.SigningMethodRS256, other, "one", claims(nil)), "TOKEN_INVALID"},
		{"an unknown key", sign(t, jwt.SigningMethodRS256, key, "four", claims(nil)), "TOKEN_INVALID"},
		{"no key named", sign(t, jwt.SigningMethodRS256, key, "", claims(nil)), "user:42"},
		{"the token for services", internal[len("Bearer "):], "TOKEN_INVALID"},
		{"a signature cut off", with(nil)[:200], "TOKEN_INVALID"},
		{"no token", "x", "TOKEN_INVALID"},
	} {
		if got, status := reasonOf(id, c.token); got != c.want {
			t.Errorf("%s: %s (%d), should be %s", c.name, got, status, c.want)
		} else if status != 200 && status != 401 {
			t.Errorf("%s: status %d", c.name, status)
		}
	}
}

func TestKeysRotateAndAreKept(t *testing.T) {
	p := newProvider(t)
	key, public := rsaKey(t, "one")
	p.keys.Store([]jwk{public})
	id := external(t, p)
	if got, _ := reasonOf(id, sign(t, jwt.SigningMethodRS256, key, "one", claims(nil))); got != "user:42" {
		t.Fatal(got)
	}
	newer, newPublic := rsaKey(t, "two")
	p.keys.Store([]jwk{public, newPublic})
	if got, _ := reasonOf(id, sign(t, jwt.SigningMethodRS256, newer, "two", claims(nil))); got != "user:42" {
		t.Errorf("a new key isn't fetched when it is first seen: %s", got)
	}
	p.away.Store(true)
	if got, _ := reasonOf(id, sign(t, jwt.SigningMethodRS256, key, "one", claims(jwt.MapClaims{"jti": "2"}))); got != "user:42" {
		t.Errorf("known keys aren't kept while the provider is away: %s", got)
	}
}

func TestWithoutTheProvidersKeysNobodyIsToldThatTheirTokenIsBad(t *testing.T) {
	p := newProvider(t)
	p.away.Store(true)
	key, _ := rsaKey(t, "one")
	id := external(t, p)
	if got, status := reasonOf(id, sign(t, jwt.SigningMethodRS256, key, "one", claims(nil))); status != 503 {
		t.Errorf("%s (%d)", got, status)
	}
}

func TestDevelopmentTakesTheMeshsOwnTokens(t *testing.T) {
	id, err := newIdentity(context.Background(), config{authSecret: []byte(secret)}, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	key, _ := rsaKey(t, "one")
	mesh := jwt.MapClaims{"iss": "starling", "aud": "starling", "sub": "user:42"}
	for _, c := range []struct{ name, token, want string }{
		{"a user", sign(t, jwt.SigningMethodHS256, []byte(secret), "", claims(mesh)), "user:42"},
		{"the operator", sign(t, jwt.SigningMethodHS256, []byte(secret), "", claims(jwt.MapClaims{"iss": "starling", "aud": "starling", "sub": "operator"})), "operator"},
		{"a service", sign(t, jwt.SigningMethodHS256, []byte(secret), "", claims(jwt.MapClaims{"iss": "starling", "aud": "starling", "sub": "service:5"})), "TOKEN_INVALID"},
		{"another secret", sign(t, jwt.SigningMethodHS256, []byte(secret+"!"), "", claims(mesh)), "TOKEN_INVALID"},
		{"alg none", sign(t, jwt.SigningMethodNone, jwt.UnsafeAllowNoneSignatureType, "", claims(mesh)), "TOKEN_INVALID"},
		{"alg HS512", sign(t, jwt.SigningMethodHS512, []byte(secret), "", claims(mesh)), "TOKEN_INVALID"},
		{"RS256", sign(t, jwt.SigningMethodRS256, key, "", claims(mesh)), "TOKEN_INVALID"},
	} {
		if got, _ := reasonOf(id, c.token); got != c.want {
			t.Errorf("%s: %s, should be %s", c.name, got, c.want)
		}
	}
}

func TestWhatIsKnownOfATokenEndsWithIt(t *testing.T) {
	now := time.Now()
	id, err := newIdentity(context.Background(), config{authSecret: []byte(secret)}, func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	token := sign(t, jwt.SigningMethodHS256, []byte(secret), "", claims(jwt.MapClaims{"iss": "starling", "aud": "starling", "sub": "user:42"}))
	first, refused := id.verify(token)
	if refused != nil {
		t.Fatal(refused.Reason)
	}
	if again, _ := id.verify(token); again.bearer != first.bearer {
		t.Error("the token for services is made for each request")
	}
	now = now.Add(knownFor + time.Second)
	if later, _ := id.verify(token); later.bearer == first.bearer {
		t.Error("the token for services isn't renewed before it ends")
	}
	now = now.Add(2 * time.Minute)
	if got, _ := reasonOf(id, token); got != "TOKEN_EXPIRED" {
		t.Error(got)
	}
}
