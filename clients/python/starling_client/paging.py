"""Page after page. Only an empty token ends a walk: a page may be short, even empty."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Protocol, TypeVar

PAGES_MAX = 1_000_000


class Page(Protocol):
    """What every List… RPC answers."""

    @property
    def next_page_token(self) -> str:
        """Empty on the last page, and only there."""
        ...


P = TypeVar("P", bound=Page)


def pages(read: Callable[[str], P]) -> Iterator[P]:
    """All pages; `read(page_token)` gives one. Raises what it raises."""
    token = ""
    for _ in range(PAGES_MAX):
        page = read(token)
        yield page
        token = page.next_page_token
        if not token:
            return
    raise RuntimeError(f"no end after {PAGES_MAX:,} pages")


async def async_pages(read: Callable[[str], Awaitable[P]]) -> AsyncIterator[P]:
    """The same for asyncio."""
    token = ""
    for _ in range(PAGES_MAX):
        page = await read(token)
        yield page
        token = page.next_page_token
        if not token:
            return
    raise RuntimeError(f"no end after {PAGES_MAX:,} pages")
