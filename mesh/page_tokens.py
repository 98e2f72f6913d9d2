"""Opaque page tokens (AIP-158): what they hold is signed, and bound to one reader and one request.

Layout before base64url: version byte, position (8 bytes), ids that the next page must know of (8 bytes each, mostly
none), 16 bytes of HMAC-SHA-256 over RPC, binding and all of these. What a token is bound to (the reader, the request
without page_size) isn't in the token: it goes into the HMAC from the request at hand, so that a token of another reader
or request simply doesn't verify.
"""

import base64
import binascii
import hmac
import struct
from collections.abc import Sequence

from mesh.errors import InvalidArgumentError

_VERSION = 1
_MAC_BYTES = 16
_LAYOUT = struct.Struct(">BQ")
_ID_BYTES = 8
_TOKEN_CHARS_MAX = 4_096
_FIELD = "page_token"


class PageTokens:
    """Encodes and decodes with rotating keys: the first signs, all verify."""

    def __init__(self, keys: Sequence[str]) -> None:
        assert keys, "at least one key"
        self._keys = [key.encode() for key in keys]

    def encode(self, rpc: str, binding: Sequence[int | str], position: int, known: Sequence[int] = ()) -> str:
        """A token for the page after `position` (an id); `known`: at most 300 ids for `decode_with_known`."""
        body = _LAYOUT.pack(_VERSION, position) + struct.pack(f">{len(known)}Q", *known)
        token = body + _mac(self._keys[0], rpc, binding, body)
        return _text(token)

    def decode(self, rpc: str, binding: Sequence[int | str], token: str) -> int:
        """The position of a token. Raises InvalidArgumentError naming page_token."""
        return self.decode_with_known(rpc, binding, token)[0]

    def decode_with_known(self, rpc: str, binding: Sequence[int | str], token: str) -> tuple[int, Sequence[int]]:
        """The position of a token, and the ids that it was given. Raises InvalidArgumentError naming page_token."""
        if len(token) > _TOKEN_CHARS_MAX or not token.isascii():
            raise _not_ours()
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise _not_ours() from error
        body, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
        if len(body) < _LAYOUT.size or (len(body) - _LAYOUT.size) % _ID_BYTES or body[0] != _VERSION:
            raise _not_ours()
        if _text(raw) != token:  # Else its last character's spare bits could say anything.
            raise _not_ours()
        if not any(hmac.compare_digest(mac, _mac(key, rpc, binding, body)) for key in self._keys):
            raise _not_ours()
        ids = struct.unpack(f">{len(body[1:]) // _ID_BYTES}Q", body[1:])
        return ids[0], ids[1:]


def _text(token: bytes) -> str:
    return base64.urlsafe_b64encode(token).rstrip(b"=").decode()


def _mac(key: bytes, rpc: str, binding: Sequence[int | str], body: bytes) -> bytes:
    message = "\0".join([rpc, *(str(part) for part in binding)]).encode() + b"\0" + body
    return hmac.digest(key, message, "sha256")[:_MAC_BYTES]


def _not_ours() -> InvalidArgumentError:
    return InvalidArgumentError(_FIELD, "Not a token that this call gave to this caller.", reason="PAGE_TOKEN_INVALID")
