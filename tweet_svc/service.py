"""TweetService: checks, then the store, then what makes the author's own next reads right."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from mesh import checks, failpoints, principals
from mesh.caches.bodies import Bodies
from mesh.clock import Clock
from mesh.errors import InvalidArgumentError, NotFoundError, PermissionDeniedError, UnavailableError
from mesh.ids import ID_MAX, Snowflakes
from mesh.page_tokens import PageTokens
from mesh.server import ANYONE, SERVICES, USERS, Allowed
from mesh.timelines import port as lists
from mesh.timelines.port import ListState, Timelines
from mesh.timelines.warming import Content, Warmer, rebuild
from starling.tweet.v1 import tweet_pb2, tweet_pb2_grpc
from tweet_svc import core
from tweet_svc.store import Request, StoredTweet, TweetStore

log = logging.getLogger(__name__)

_SERVICE = "/starling.tweet.v1.TweetService/"
ALLOWED: Allowed = {
    _SERVICE + "CreateTweet": USERS,
    _SERVICE + "GetTweet": ANYONE,
    _SERVICE + "BatchGetTweets": ANYONE,
    _SERVICE + "HydrateTweets": SERVICES,
    _SERVICE + "ListUserTweets": ANYONE,
    _SERVICE + "StreamAuthorTweets": SERVICES,
    _SERVICE + "DeleteTweet": USERS,
}

_BATCH_MAX = 100
_HYDRATE_MAX = 200
_STREAM_AUTHORS_MAX = 5_001
_STREAM_LIMIT_MAX = 10_000
_STREAM_LIMIT_DEFAULT = 1_000
_STREAM_MESSAGE_IDS = 1_000
_INLINE_SECONDS = 0.25
"""How long a reply waits for caches and lists: the worker repeats what they miss."""

AccountExists = Callable[[int], Awaitable[bool]]
"""Whether a user is registered; raises UnavailableError."""


class TweetService(tweet_pb2_grpc.TweetServiceServicer):
    """Ports come as arguments; see the proto for what each method does."""

    def __init__(
        self,
        *,
        store: TweetStore,
        timelines: Timelines,
        bodies: Bodies,
        snowflakes: Snowflakes,
        page_tokens: PageTokens,
        account_exists: AccountExists,
        on_write: Callable[[], None],
        clock: Clock,
        outbox_max: int,
    ) -> None:
        self._store = store
        self._timelines = timelines
        self._bodies = bodies
        self._snowflakes = snowflakes
        self._page_tokens = page_tokens
        self._account_exists = account_exists
        self._on_write = on_write
        self._clock = clock
        self._outbox_max = outbox_max
        self.warmer = Warmer(self.rebuild_author_list)

    async def CreateTweet(self, request: tweet_pb2.CreateTweetRequest, context: Any) -> tweet_pb2.CreateTweetResponse:
        """See the proto."""
        author_id = principals.current.get().user_id
        draft = core.draft(request)
        now = self._clock.now_ms()
        asked = Request(draft.request_id, draft.fingerprint, now + core.REQUEST_TTL_MS) if draft.request_id else None
        # A retry first: what it refers to may be gone by now, and the tweet stands all the same.
        stored = await self._store.made_before(author_id, asked, now) if asked else None
        if stored is None:
            tweet = await self._new_tweet(author_id, draft)
            stored = await self._store.create_tweet(tweet, asked, now, self._outbox_max)
        if failpoints.ARMED:
            failpoints.hit("after-outbox-row")
        self._on_write()
        if stored.deleted:
            raise NotFoundError("That request's tweet has been deleted since.", reason="TWEET_NOT_FOUND")
        message = core.to_message(stored)
        await self._show_author(message)
        return tweet_pb2.CreateTweetResponse(tweet=message, read_your_write_token=str(stored.tweet_id))

    async def _new_tweet(self, author_id: int, draft: core.Draft) -> StoredTweet:
        await self._require_account(author_id)
        replied_to = await self._referenced(draft.in_reply_to_tweet_id)
        await self._referenced(draft.quoted_tweet_id)
        return StoredTweet(
            tweet_id=self._snowflakes.next_id(),
            author_id=author_id,
            text=draft.text,
            in_reply_to_tweet_id=draft.in_reply_to_tweet_id,
            in_reply_to_user_id=replied_to.author_id if replied_to else 0,
            quoted_tweet_id=draft.quoted_tweet_id,
            media_ids=draft.media_ids,
            mentions=draft.mentions,
        )

    async def _require_account(self, author_id: int) -> None:
        # With graph_svc away, the verified token vouches: posts don't wait for it.
        with suppress(UnavailableError):
            if not await self._account_exists(author_id):
                raise NotFoundError("No such user.", reason="USER_NOT_FOUND", user_id=str(author_id))

    async def _referenced(self, tweet_id: int) -> StoredTweet | None:
        return await self._visible(tweet_id) if tweet_id else None

    async def _visible(self, tweet_id: int) -> StoredTweet:
        found = await self._store.tweets([tweet_id])
        if not found or found[0].deleted:
            raise NotFoundError("No such tweet.", reason="TWEET_NOT_FOUND", tweet_id=str(tweet_id))
        return found[0]

    async def _show_author(self, tweet: tweet_pb2.Tweet) -> None:
        """The author's own lists, at once; fan-out repeats this, so a failure costs a little delay."""
        keys = [lists.home(tweet.author_id), lists.author(tweet.author_id)]
        try:
            async with asyncio.timeout(_INLINE_SECONDS):
                await asyncio.gather(self._timelines.push(keys, [tweet.tweet_id]), self._bodies.put([tweet]))
        except (TimeoutError, UnavailableError) as error:
            log.debug("inline push of %d left to fan-out: %s", tweet.tweet_id, error)

    async def GetTweet(self, request: tweet_pb2.GetTweetRequest, context: Any) -> tweet_pb2.GetTweetResponse:
        """See the proto."""
        tweet = await self._visible(checks.required_id("tweet_id", request.tweet_id))
        return tweet_pb2.GetTweetResponse(tweet=core.to_message(tweet))

    async def BatchGetTweets(
        self, request: tweet_pb2.BatchGetTweetsRequest, context: Any
    ) -> tweet_pb2.BatchGetTweetsResponse:
        """See the proto."""
        found = await self._store.tweets(checks.batch("tweet_ids", request.tweet_ids, _BATCH_MAX))
        tweets = [core.to_message(tweet) for tweet in found if not tweet.deleted]
        return tweet_pb2.BatchGetTweetsResponse(tweets=tweets)

    async def HydrateTweets(
        self, requests: AsyncIterator[tweet_pb2.HydrateTweetsRequest], context: Any
    ) -> AsyncIterator[tweet_pb2.HydrateTweetsResponse]:
        """See the proto. What is read is cached for the next reader."""
        async for request in requests:
            asked = checks.batch("tweet_ids", request.tweet_ids, _HYDRATE_MAX)
            found = await self._store.tweets(asked)
            response = tweet_pb2.HydrateTweetsResponse(
                tweets=[core.to_message(tweet) for tweet in found if not tweet.deleted],
                deleted=[tweet.tweet_id for tweet in found if tweet.deleted],
                missing=sorted(set(asked) - {tweet.tweet_id for tweet in found}),
            )
            with suppress(TimeoutError, UnavailableError):
                async with asyncio.timeout(_INLINE_SECONDS):
                    await self._bodies.put(response.tweets)
            yield response

    async def ListUserTweets(
        self, request: tweet_pb2.ListUserTweetsRequest, context: Any
    ) -> tweet_pb2.ListUserTweetsResponse:
        """See the proto."""
        user_id = checks.required_id("user_id", request.user_id)
        size = checks.page_size(request.page_size)
        binding = (str(principals.current.get()), user_id)
        below = ID_MAX
        if request.page_token:
            below = self._page_tokens.decode("ListUserTweets", binding, request.page_token)
        tweets = await self._newest_visible(user_id, below, size + 1)
        if not tweets and not request.page_token:
            await self._require_account(user_id)
        more = len(tweets) > size
        page = tweets[:size]
        return tweet_pb2.ListUserTweetsResponse(
            tweets=[core.to_message(tweet) for tweet in page],
            next_page_token=self._page_tokens.encode("ListUserTweets", binding, page[-1].tweet_id) if more else "",
        )

    async def _newest_visible(self, author_id: int, below_id: int, count: int) -> list[StoredTweet]:
        """At most `count` visible tweets; fewer only when no more are there."""
        visible: list[StoredTweet] = []
        while len(visible) < count:  # Each round goes further down, or ends.
            ids = await self._author_ids(author_id, below_id, count - len(visible))
            if not ids:
                break
            visible += [tweet for tweet in await self._store.tweets(ids) if not tweet.deleted]
            below_id = ids[-1]
        return visible

    async def _author_ids(self, author_id: int, below_id: int, count: int) -> Sequence[int]:
        """The author's next ids: from the list while it is exact, from the store below its floor or without it."""
        try:
            view = await self._timelines.read(lists.author(author_id), 2 * self._timelines.cap)
        except UnavailableError:
            view = None
        if view is None or view.record.state is not ListState.READY:
            self.warmer.enqueue(author_id)
        elif view.complete:
            cached = [tweet_id for tweet_id in view.ids if tweet_id < below_id][:count]
            if cached or view.record.floor == 0:
                return cached
        return (await self._store.author_tweet_ids([author_id], [below_id], [count]))[0]

    async def rebuild_author_list(self, author_id: int) -> None:
        """Make the author's list from the store. Raises UnavailableError."""

        async def fetch() -> Content:
            cap = self._timelines.cap
            (ids,) = await self._store.author_tweet_ids([author_id], [ID_MAX], [cap])
            return Content(0, ids, ids[-1] if len(ids) == cap else 0)

        await rebuild(self._timelines, lists.author(author_id), fetch)

    async def StreamAuthorTweets(
        self, request: tweet_pb2.StreamAuthorTweetsRequest, context: Any
    ) -> AsyncIterator[tweet_pb2.StreamAuthorTweetsResponse]:
        """See the proto."""
        authors = checks.batch("author_ids", request.author_ids, _STREAM_AUTHORS_MAX)
        limit = request.limit or _STREAM_LIMIT_DEFAULT
        if not 0 < limit <= _STREAM_LIMIT_MAX:
            raise InvalidArgumentError("limit", f"Must be 1 to {_STREAM_LIMIT_MAX:,}, or 0.")
        merge = core.AuthorMerge(authors, request.below_id or ID_MAX, limit)
        while limit > 0:
            ids: list[int] = []
            while len(ids) < min(limit, _STREAM_MESSAGE_IDS) and not merge.exhausted:
                ids += merge.take(min(limit, _STREAM_MESSAGE_IDS) - len(ids))
                wanted, below, counts = merge.wanted()
                if wanted:
                    merge.feed(await self._store.author_tweet_ids(wanted, below, counts))
            limit -= len(ids)
            yield tweet_pb2.StreamAuthorTweetsResponse(tweet_ids=ids, exhausted=merge.exhausted)
            if merge.exhausted:
                return

    async def DeleteTweet(self, request: tweet_pb2.DeleteTweetRequest, context: Any) -> tweet_pb2.DeleteTweetResponse:
        """See the proto."""
        tweet_id = checks.required_id("tweet_id", request.tweet_id)
        author_id = principals.current.get().user_id
        tweet = await self._store.delete_tweet(tweet_id, author_id)
        if tweet is None or (tweet.deleted and tweet.author_id != author_id):
            raise NotFoundError("No such tweet.", reason="TWEET_NOT_FOUND", tweet_id=str(tweet_id))
        if tweet.author_id != author_id:
            raise PermissionDeniedError("Only its author may delete a tweet.", reason="NOT_THE_AUTHOR")
        self._on_write()
        # A cached body that outlives its deletion would be shown: no reply before it's gone. Fan-out repeats this, for
        # a cache that was restarted and lost its last moments.
        await self._bodies.put_deleted(tweet_id, tweet.version)
        return tweet_pb2.DeleteTweetResponse()
