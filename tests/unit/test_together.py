"""Calls that are worked on together."""

import asyncio
from collections.abc import Sequence

import pytest

from mesh import principals
from mesh.errors import NotFoundError, ResourceExhaustedError, StarlingError, UnavailableError
from tests.waiting import turns
from tweet_svc import together as together_module
from tweet_svc.together import BATCH_MAX, Together


class Held:
    """Work that waits until it is let go. Users whose number divides by 10 aren't found."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[int]]] = []
        self.let_go = asyncio.Event()
        self.error: Exception | None = None

    async def work(self, tweet_id: int, user_ids: Sequence[int]) -> Sequence[str | StarlingError]:
        assert principals.current.get(None) is None, "it is nobody's call"
        self.batches.append((tweet_id, list(user_ids)))
        await self.let_go.wait()
        if self.error:
            raise self.error
        return [f"{tweet_id} by {user}" if user % 10 else NotFoundError("no", reason="NO") for user in user_ids]


async def test_what_comes_while_a_batch_is_worked_on_is_the_next_batch() -> None:
    held = Held()
    together = Together(held.work)
    principals.current.set(principals.OPERATOR)
    calls = [asyncio.create_task(together.call(5, 1))]
    await turns(3)
    calls += [asyncio.create_task(together.call(5, user)) for user in range(2, BATCH_MAX + 4)]
    other = asyncio.create_task(together.call(6, 1))
    await turns(3)
    assert held.batches == [(5, [1]), (6, [1])], "other tweets don't wait"
    held.let_go.set()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [len(users) for tweet, users in held.batches if tweet == 5] == [1, BATCH_MAX, 2]
    for user, outcome in enumerate(outcomes, 1):
        assert outcome == f"5 by {user}" if user % 10 else isinstance(outcome, NotFoundError)
    assert await other == "6 by 1"


async def test_a_batch_that_fails_fails_for_all_of_it_and_the_next_one_is_tried() -> None:
    held = Held()
    held.error = UnavailableError("not now")
    held.let_go.set()
    together = Together(held.work)
    failed = await asyncio.gather(*(together.call(5, user) for user in (1, 2)), return_exceptions=True)
    assert [type(error) for error in failed] == [UnavailableError] * 2
    held.error = None
    assert await together.call(5, 3) == "5 by 3"


async def test_a_caller_that_goes_leaves_the_others_their_outcomes() -> None:
    held = Held()
    together = Together(held.work)
    calls = [asyncio.create_task(together.call(5, user)) for user in (1, 2)]
    await turns(3)
    calls[0].cancel()
    held.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await calls[0]
    assert await calls[1] == "5 by 2"


async def test_work_counts_until_it_is_done_without_its_callers_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(together_module, "CALLS_MAX", 3)
    held = Held()
    together = Together(held.work)
    calls = [asyncio.create_task(together.call(5, user)) for user in (1, 2, 3)]
    await turns(3)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    with pytest.raises(ResourceExhaustedError):
        await together.call(5, 4)
    held.let_go.set()
    await turns(5)
    assert await together.call(5, 4) == "5 by 4"


async def test_a_piece_of_the_work_that_is_cancelled_ends_no_more_than_its_batch() -> None:
    attempts: list[int] = []

    async def work(tweet_id: int, user_ids: Sequence[int]) -> Sequence[str | StarlingError]:
        attempts.append(tweet_id)
        if len(attempts) == 1:
            raise asyncio.CancelledError
        return ["done"] * len(user_ids)

    together = Together(work)
    with pytest.raises(UnavailableError):
        await together.call(5, 1)
    assert await together.call(5, 1) == "done"
