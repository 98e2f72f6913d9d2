"""Where media are: made and signed when a tweet is read, so that another base or key holds for old tweets, too.

A URL is `<base>/<media id>?expires=<Unix seconds>&signature=<base64url of HMAC-SHA-256 over "<media id>\\n<expires>">`.
It holds for one to two hours, and is the same for all who ask within an hour, so that caches on the way help.
"""

import base64
import hmac
from collections.abc import Sequence

from mesh.clock import Clock

_HOUR_SECONDS = 3_600


class MediaUrls:
    """Signs with one key; media servers know it, and while it is rotated the one before. Without a base: no URLs."""

    def __init__(self, base_url: str, key: str, clock: Clock) -> None:
        self._base_url = base_url.rstrip("/")
        self._key = key.encode()
        self._clock = clock

    def urls(self, media_ids: Sequence[str]) -> list[str]:
        """One for each, in order; none when no base is configured."""
        if not self._base_url:
            return []
        expires = (self._clock.now_ms() // 1_000 // _HOUR_SECONDS + 2) * _HOUR_SECONDS
        return [self._url(media_id, expires) for media_id in media_ids]

    def _url(self, media_id: str, expires: int) -> str:
        mac = hmac.digest(self._key, f"{media_id}\n{expires}".encode(), "sha256")
        signature = base64.urlsafe_b64encode(mac).rstrip(b"=").decode()
        return f"{self._base_url}/{media_id}?expires={expires}&signature={signature}"
