"""What the driver's futures may do to us."""

from collections.abc import Callable
from typing import Any

from mesh.cassandra import first_answer


class TwiceAnswered:
    """As a statement's future that was sent to two nodes."""

    _paging_state = b"more"

    def add_callbacks(self, callback: Callable[[Any], None], errback: Callable[[BaseException], None]) -> None:
        callback([(1,), (2,)])
        self._paging_state = b"other"
        callback([(1,), (2,)])
        errback(RuntimeError("the other node is gone"))


async def test_the_first_of_two_answers_counts() -> None:
    twice: Any = TwiceAnswered()
    assert await first_answer(twice) == ([(1,), (2,)], b"more")
