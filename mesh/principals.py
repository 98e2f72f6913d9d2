"""Who calls: principals in signed tokens (JWT, HS256), verified on every call, never read from a request."""

import time
from collections import OrderedDict
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum

import jwt

from mesh import tracing
from mesh.errors import PermissionDeniedError, UnauthenticatedError

METADATA_KEY = "authorization"
_ALGORITHM = "HS256"
_ISSUER = "starling"
_AUDIENCE = "starling"
_TOKEN_BYTES_MAX = 4_096
_VERIFIED_MAX = 10_000
_RENEW_MARGIN_SECONDS = 60.0


class Kind(Enum):
    """`USER`: a person; `SERVICE`: a member of the mesh; `OPERATOR`: who runs it."""

    USER = "user"
    SERVICE = "service"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Principal:
    """A verified caller. `name`: decimal user id, service name, or empty for the operator."""

    kind: Kind
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.name}" if self.name else self.kind.value

    @property
    def user_id(self) -> int:
        """The calling user's id. Raises PermissionDeniedError for other kinds."""
        if self.kind is not Kind.USER:
            raise PermissionDeniedError("Only a user may call this.", reason="USERS_ONLY")
        return int(self.name)


def user(user_id: int) -> Principal:
    """The principal of a user."""
    return Principal(Kind.USER, str(user_id))


def service(name: str) -> Principal:
    """The principal of a service."""
    return Principal(Kind.SERVICE, name)


OPERATOR = Principal(Kind.OPERATOR)

current: ContextVar[Principal] = ContextVar("current_principal")
"""The caller of the RPC being handled; set by `mesh.server`."""


def mint(secret: str, principal: Principal, lifetime_seconds: float = 3_600.0) -> str:
    """A token for the principal, valid from now for `lifetime_seconds`."""
    now = time.time()
    claims = {
        "sub": str(principal),
        "iss": _ISSUER,
        "aud": _AUDIENCE,
        "iat": int(now),
        "exp": int(now + lifetime_seconds),
    }
    return jwt.encode(claims, secret, algorithm=_ALGORITHM)


class Verifier:
    """Verifies tokens, and remembers the verified ones until they expire (bounded)."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._verified: OrderedDict[str, tuple[Principal, float]] = OrderedDict()

    def verify(self, header: str | None) -> Principal:
        """The principal of an `authorization` value. Raises UnauthenticatedError, saying what is wrong."""
        if not header:
            raise UnauthenticatedError("No token: send metadata 'authorization: Bearer <token>'.")
        scheme, _, token = header.partition(" ")
        if scheme.lower() != "bearer" or not token or len(token) > _TOKEN_BYTES_MAX:
            raise UnauthenticatedError("The authorization metadata isn't 'Bearer <token>'.")
        known = self._verified.get(token)
        if known and time.time() < known[1]:
            return known[0]
        principal, expires = self._decode(token)
        self._verified[token] = (principal, expires)
        if len(self._verified) > _VERIFIED_MAX:
            self._verified.popitem(last=False)
        return principal

    def _decode(self, token: str) -> tuple[Principal, float]:
        try:
            claims = jwt.decode(
                token,
                self._secret,
                algorithms=[_ALGORITHM],
                audience=_AUDIENCE,
                issuer=_ISSUER,
                options={"require": ["exp", "iat", "sub"]},
            )
        except jwt.ExpiredSignatureError as error:
            raise UnauthenticatedError("The token has expired.", reason="TOKEN_EXPIRED") from error
        except jwt.InvalidTokenError as error:
            raise UnauthenticatedError("The token isn't valid.", reason="TOKEN_INVALID") from error
        return parse(claims["sub"]), float(claims["exp"])


def parse(text: str) -> Principal:
    """The inverse of str(principal). Raises UnauthenticatedError."""
    kind, _, name = text.partition(":")
    is_id = name.isascii() and name.isdecimal() and 0 < int(name) < 1 << 64
    if kind == Kind.USER.value and is_id:
        return Principal(Kind.USER, str(int(name)))
    if kind == Kind.SERVICE.value and name:
        return Principal(Kind.SERVICE, name)
    if text == Kind.OPERATOR.value:
        return OPERATOR
    raise UnauthenticatedError("The token names no principal that we know.", reason="TOKEN_INVALID")


class Credentials:
    """The metadata that one principal sends; its token is renewed before it expires."""

    def __init__(self, secret: str, principal: Principal, lifetime_seconds: float = 3_600.0) -> None:
        self._secret = secret
        self._principal = principal
        self._lifetime_seconds = lifetime_seconds
        self._expires = 0.0
        self._metadata: tuple[tuple[str, str], ...] = ()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For the `metadata` argument of a call; the trace goes along."""
        if time.time() > self._expires - _RENEW_MARGIN_SECONDS:
            token = mint(self._secret, self._principal, self._lifetime_seconds)
            self._expires = time.time() + self._lifetime_seconds
            self._metadata = ((METADATA_KEY, f"Bearer {token}"),)
        traceparent = tracing.current.get()
        return (*self._metadata, (tracing.METADATA_KEY, traceparent)) if traceparent else self._metadata
