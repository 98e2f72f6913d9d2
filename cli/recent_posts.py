"""Remembers each author's last read-your-write token, so that `starling home` always carries it.

One small file per author, made by whoever posts: two commands at once don't get in each other's way. Only a help: a
folder that can't be written costs nothing but the promise that the very next `home` shows the tweet.
"""

from contextlib import suppress
from pathlib import Path

_AUTHORS_MAX = 1_000
_SWEEP_TO = 900
_TOKEN_BYTES_MAX = 256


class RecentPosts:
    """Tokens by author, in a folder within the data folder."""

    def __init__(self, data: Path) -> None:
        self._folder = data / "recent-posts"

    def remember(self, author_id: int, token: str) -> None:
        """The token of the author's newest tweet."""
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = self._folder / f"{author_id}.new"
            temporary.write_text(token, encoding="ascii")
            temporary.replace(self._folder / str(author_id))
            self._sweep()

    def token(self, author_id: int) -> str:
        """The token last remembered, or empty."""
        with suppress(OSError, ValueError):
            return (self._folder / str(author_id)).read_text(encoding="ascii")[:_TOKEN_BYTES_MAX]
        return ""

    def _sweep(self) -> None:
        """Forget who posted longest ago when there are too many."""
        files = list(self._folder.iterdir())
        if len(files) > _AUTHORS_MAX:
            files.sort(key=lambda file: file.stat().st_mtime)
            for file in files[:-_SWEEP_TO]:
                file.unlink(missing_ok=True)
