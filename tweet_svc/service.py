"""TweetService: checks, then the store, then what makes the author's own next reads right."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from mesh import checks, failpoints, principals
from mesh.caches.bodies import Bodies, Body
from mesh.caches.counts import Tally
from mesh.clock import Clock
from mesh.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    StarlingError,
    UnavailableError,
)
from mesh.ids import ID_MAX, Snowflakes
from mesh.media import MediaUrls
from mesh.page_tokens import PageTokens
from mesh.server import ANYONE, SERVICES, USERS, Allowed
from mesh.timelines import port as lists
from mesh.timelines.port import ListState, Timelines
from mesh.timelines.warming import Content, Warmer, rebuild
from starling.tweet.v1 import tweet_pb2, tweet_pb2_grpc
from tweet_svc import core
from tweet_svc.accounts import Accounts
from tweet_svc.core import Heat
from tweet_svc.counting import Counting
from tweet_svc.store import Change, Request, StoredTweet, TweetStore
from tweet_svc.together import Together
from tweet_svc.velocity import Velocity

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
    _SERVICE + "UpdateTweet": USERS,
    _SERVICE + "ListTweetRevisions": ANYONE,
    _SERVICE + "Retweet": USERS,
    _SERVICE + "UndoRetweet": USERS,
    _SERVICE + "Like": USERS,
    _SERVICE + "Unlike": USERS,
    _SERVICE + "BatchGetEngagements": USERS,
}

_BATCH_MAX = 100
_HYDRATE_MAX = 200
_STREAM_AUTHORS_MAX = 5_001
_STREAM_LIMIT_MAX = 10_000
_STREAM_LIMIT_DEFAULT = 1_000
_STREAM_MESSAGE_IDS = 1_000
_VERSION_MAX = 1 << 32
_INLINE_SECONDS = 0.25
"""How long a reply waits for caches and lists: the worker repeats what they miss."""


class OnWrite(Protocol):
    """Is told that an outbox row was written."""

    def __call__(self, *, slow: bool = False) -> None:
        """`slow`: one of what may wait."""
        ...


class TweetService(tweet_pb2_grpc.TweetServiceServicer):
    """Ports come as arguments; see the proto for what each method does."""

    def __init__(
        self,
        *,
        store: TweetStore,
        timelines: Timelines,
        bodies: Bodies,
        counting: Counting,
        media: MediaUrls,
        velocity: Velocity,
        snowflakes: Snowflakes,
        page_tokens: PageTokens,
        accounts: Accounts,
        on_write: OnWrite,
        clock: Clock,
        outbox_max: int,
        outbox_slow_max: int,
    ) -> None:
        self._store = store
        self._timelines = timelines
        self._bodies = bodies
        self._counting = counting
        self._media = media
        self._velocity = velocity
        self._snowflakes = snowflakes
        self._page_tokens = page_tokens
        self._accounts = accounts
        self._on_write = on_write
        self._clock = clock
        self._outbox_max = outbox_max
        self._outbox_slow_max = outbox_slow_max
        self._hot_retweets = Together(self._retweet_hot)
        self.warmer = Warmer(self.rebuild_author_list)

    async def CreateTweet(self, request: tweet_pb2.CreateTweetRequest, context: Any) -> tweet_pb2.CreateTweetResponse:
        """See the proto."""
        author_id = principals.current.get().user_id
        draft = core.draft(request)
        now = self._clock.now_ms()
        asked = Request(draft.request_id, draft.fingerprint, now + core.REQUEST_TTL_MS) if draft.request_id else None
        # A retry first: what it refers to may be gone by now, and the tweet stands all the same.
        stored = await self._store.made_before(author_id, asked, now) if asked else None
        new = False
        if stored is None:
            tweet = await self._new_tweet(author_id, draft)
            stored = await self._store.create_tweet(tweet, asked, now, self._outbox_max)
            self._on_write()
            new = stored.tweet_id == tweet.tweet_id
        if failpoints.ARMED:
            failpoints.hit("after-outbox-row")
        if stored.deleted:
            raise NotFoundError("That request's tweet has been deleted since.", reason="TWEET_NOT_FOUND")
        message = core.to_message(stored)
        counted = [self._counting.add(core.counted(stored, 1))] if new else []
        await asyncio.gather(self._show_author(message, new=new), *counted)
        message.media_urls[:] = self._media.urls(message.media_ids)
        return tweet_pb2.CreateTweetResponse(tweet=message, read_your_write_token=str(stored.tweet_id))

    async def _new_tweet(self, author_id: int, draft: core.Draft) -> StoredTweet:
        replied_to = await self._original(draft.in_reply_to_tweet_id) if draft.in_reply_to_tweet_id else None
        quoted = await self._original(draft.quoted_tweet_id) if draft.quoted_tweet_id else None
        await self._require_access(author_id, [tweet.author_id for tweet in (replied_to, quoted) if tweet])
        return StoredTweet(
            tweet_id=self._snowflakes.next_id(),
            author_id=author_id,
            text=draft.text,
            in_reply_to_tweet_id=replied_to.tweet_id if replied_to else 0,
            in_reply_to_user_id=replied_to.author_id if replied_to else 0,
            quoted_tweet_id=quoted.tweet_id if quoted else 0,
            media_ids=draft.media_ids,
            mentions=draft.mentions,
            quoted_user_id=quoted.author_id if quoted else 0,
        )

    async def _require_account(self, author_id: int) -> None:
        # With graph_svc away, the verified token vouches: posts don't wait for it.
        with suppress(UnavailableError):
            if not await self._accounts.exists(author_id):
                raise _no_such_user(author_id)

    async def _require_access(self, user_id: int, author_ids: Sequence[int]) -> None:
        """The user is registered, and may do something with tweets of these."""
        others = sorted({*author_ids} - {user_id})
        if not others:
            await self._require_account(user_id)
        elif await self._accounts.any_block(user_id, others):
            raise _blocked()

    async def _original(self, tweet_id: int) -> StoredTweet:
        """A visible tweet; of a retweet, what it is a retweet of."""
        tweet = await self._visible(tweet_id)
        return await self._visible(tweet.retweeted_tweet_id) if tweet.retweeted_tweet_id else tweet

    async def _original_id(self, tweet_id: int) -> int:
        """As `_original`, of tweets that are deleted or unknown, too."""
        found = await self._store.tweets([tweet_id])
        return (found[0].retweeted_tweet_id if found else 0) or tweet_id

    async def _visible(self, tweet_id: int) -> StoredTweet:
        found = await self._store.tweets([tweet_id])
        if not found or found[0].deleted:
            raise _no_such_tweet(tweet_id)
        return found[0]

    async def _show_author(self, tweet: tweet_pb2.Tweet, *, new: bool = False) -> None:
        """`new`: nobody can have liked it yet, which its first readers needn't ask."""
        await self._show_authors([tweet], *([self._counting.begin(tweet.tweet_id)] if new else []))

    async def _show_authors(self, tweets: Sequence[tweet_pb2.Tweet], *more: Coroutine[Any, Any, None]) -> None:
        """The authors' own lists, at once; fan-out repeats this, so a failure costs a little delay."""
        pushes = [
            self._timelines.push([lists.home(tweet.author_id), lists.author(tweet.author_id)], [tweet.tweet_id])
            for tweet in tweets
        ]
        try:
            async with asyncio.timeout(_INLINE_SECONDS):
                await asyncio.gather(*pushes, self._bodies.put(tweets), *more)
        except (TimeoutError, UnavailableError) as error:
            log.debug("inline pushes are left to fan-out: %s", error)

    async def GetTweet(self, request: tweet_pb2.GetTweetRequest, context: Any) -> tweet_pb2.GetTweetResponse:
        """See the proto."""
        tweet_id = checks.required_id("tweet_id", request.tweet_id)
        tweets, references = await self._shown([tweet_id])
        if not tweets:
            raise _no_such_tweet(tweet_id)
        response = tweet_pb2.GetTweetResponse(tweet=tweets[0], references=references)
        await self._complete([response.tweet], response.references)
        return response

    async def BatchGetTweets(
        self, request: tweet_pb2.BatchGetTweetsRequest, context: Any
    ) -> tweet_pb2.BatchGetTweetsResponse:
        """See the proto."""
        tweets, references = await self._shown(checks.batch("tweet_ids", request.tweet_ids, _BATCH_MAX))
        response = tweet_pb2.BatchGetTweetsResponse(tweets=tweets, references=references)
        await self._complete(response.tweets, response.references)
        return response

    async def _shown(
        self, tweet_ids: Sequence[int]
    ) -> tuple[Sequence[tweet_pb2.Tweet], Sequence[tweet_pb2.TweetReference]]:
        """The visible ones of these, and what they answer, quote or retweet. From the cache while the store is away, if
        all is there: deletions and edits are in it before they are acknowledged."""
        try:
            found = await self._store.tweets(tweet_ids)
            visible = [tweet for tweet in found if not tweet.deleted]
            return [core.to_message(tweet) for tweet in visible], await self._references(visible)
        except UnavailableError as error:
            tweets = [body for body in (await self._cached(tweet_ids, error)).values() if body]
            beside = await self._cached(core.referred_to(tweets), error)
            return tweets, [tweet_pb2.TweetReference(tweet_id=i, tweet=body) for i, body in beside.items()]

    async def _cached(self, tweet_ids: Sequence[int], error: UnavailableError) -> dict[int, Body]:
        """All of these, or the error."""
        bodies = await self._bodies.get(tweet_ids)
        if len(bodies) < len(tweet_ids):
            raise error
        return bodies

    async def _references(self, tweets: Sequence[StoredTweet]) -> list[tweet_pb2.TweetReference]:
        """What visible tweets answer, quote or retweet."""
        ids = core.referred_to(tweets)
        return core.references(ids, await self._store.tweets(ids)) if ids else []

    async def _complete(
        self, tweets: Sequence[tweet_pb2.Tweet], references: Sequence[tweet_pb2.TweetReference] = ()
    ) -> None:
        """Set what isn't a part of cached bodies: counts, and where media are."""
        shown = [*tweets, *(reference.tweet for reference in references if reference.HasField("tweet"))]
        for tweet in shown:
            tweet.media_urls[:] = self._media.urls(tweet.media_ids)
        await self._count(shown)

    async def _count(self, tweets: Sequence[tweet_pb2.Tweet]) -> None:
        """Set the counts that are known. A retweet has none: they are its original's."""
        counted = [tweet for tweet in tweets if not tweet.retweeted_tweet_id]
        known = await self._counting.of(list(dict.fromkeys(tweet.tweet_id for tweet in counted)))
        for tweet in counted:
            if tweet.tweet_id in known:
                tweet.counts.CopyFrom(known[tweet.tweet_id])

    async def HydrateTweets(
        self, requests: AsyncIterator[tweet_pb2.HydrateTweetsRequest], context: Any
    ) -> AsyncIterator[tweet_pb2.HydrateTweetsResponse]:
        """See the proto. What is read is cached for the next reader."""
        async for request in requests:
            asked = checks.batch("tweet_ids", request.tweet_ids, _HYDRATE_MAX)
            found = await self._store.tweets(asked)
            deleted = [tweet.tweet_id for tweet in found if tweet.deleted]
            if request.deleted_only:
                yield tweet_pb2.HydrateTweetsResponse(deleted=deleted)
                continue
            response = tweet_pb2.HydrateTweetsResponse(
                tweets=[core.to_message(tweet) for tweet in found if not tweet.deleted],
                deleted=deleted,
                missing=sorted(set(asked) - {tweet.tweet_id for tweet in found}),
            )
            with suppress(TimeoutError, UnavailableError):
                async with asyncio.timeout(_INLINE_SECONDS):
                    await self._bodies.put(response.tweets)
            await self._count(response.tweets)
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
        response = tweet_pb2.ListUserTweetsResponse(
            tweets=map(core.to_message, page),
            references=await self._references(page),
            next_page_token=self._page_tokens.encode("ListUserTweets", binding, page[-1].tweet_id) if more else "",
        )
        await self._complete(response.tweets, response.references)
        return response

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
        change = _own(await self._store.delete_tweet(tweet_id, author_id), tweet_id, author_id)
        await self._end(change)
        return tweet_pb2.DeleteTweetResponse()

    async def _end(self, change: Change) -> None:
        """A tweet was deleted, now or before."""
        tweet = change.tweet
        assert tweet.deleted
        self._on_write(slow=bool(tweet.retweeted_tweet_id))
        if change.changed:
            await self._counting.add(core.counted(tweet, -1))
        # A cached body that outlives its deletion would be shown: no reply before it's gone. Fan-out repeats this, for
        # a cache that was restarted and lost its last moments.
        await self._bodies.put_deleted(tweet.tweet_id, tweet.version)

    async def UpdateTweet(self, request: tweet_pb2.UpdateTweetRequest, context: Any) -> tweet_pb2.UpdateTweetResponse:
        """See the proto."""
        edit = core.edit(request)
        author_id = principals.current.get().user_id
        change = _own(
            await self._store.update_tweet(
                edit.tweet_id,
                author_id,
                edit.text,
                edit.mentions,
                self._clock.now_ms(),
                self._outbox_max,
                request.expected_version,
            ),
            edit.tweet_id,
            author_id,
        )
        if change.tweet.deleted:
            raise _no_such_tweet(edit.tweet_id)
        if change.tweet.retweeted_tweet_id:
            raise InvalidArgumentError("tweet.tweet_id", "A retweet has no text.", reason="IS_A_RETWEET")
        if change.tweet.text != edit.text:
            raise FailedPreconditionError(
                "The tweet is of another version.", reason="VERSION_MISMATCH", version=str(change.tweet.version)
            )
        self._on_write()
        message = core.to_message(change.tweet)
        # As for a deletion: whoever reads after the reply reads the new text, also after a retry that changed nothing.
        await self._bodies.put([message])
        await self._complete([message])
        return tweet_pb2.UpdateTweetResponse(tweet=message)

    async def ListTweetRevisions(
        self, request: tweet_pb2.ListTweetRevisionsRequest, context: Any
    ) -> tweet_pb2.ListTweetRevisionsResponse:
        """See the proto."""
        tweet_id = checks.required_id("tweet_id", request.tweet_id)
        size = checks.page_size(request.page_size)
        binding = (str(principals.current.get()), tweet_id)
        below = _VERSION_MAX
        if request.page_token:
            below = self._page_tokens.decode("ListTweetRevisions", binding, request.page_token)
        revisions = await self._store.revisions(tweet_id, below, size + 1)
        if revisions is None:
            raise _no_such_tweet(tweet_id)
        more = len(revisions) > size
        page = revisions[:size]
        return tweet_pb2.ListTweetRevisionsResponse(
            revisions=map(core.to_revision, page),
            next_page_token=self._page_tokens.encode("ListTweetRevisions", binding, page[-1].version) if more else "",
        )

    async def Retweet(self, request: tweet_pb2.RetweetRequest, context: Any) -> tweet_pb2.RetweetResponse:
        """See the proto."""
        author_id = principals.current.get().user_id
        tweet_id = checks.required_id("tweet_id", request.tweet_id)
        if self._velocity.is_hot(tweet_id):  # The read of the original is what most of a storm are spared.
            message = await self._hot_retweets.call(tweet_id, author_id)
        else:
            message = await self._retweet(author_id, await self._original(tweet_id))
        return tweet_pb2.RetweetResponse(tweet=message, read_your_write_token=str(message.tweet_id))

    async def _retweet(self, author_id: int, original: StoredTweet) -> tweet_pb2.Tweet:
        """Make the retweet, or find the one that there is."""
        if self._velocity.is_hot(original.tweet_id):
            return await self._hot_retweets.call(original.tweet_id, author_id)
        await self._require_access(author_id, [original.author_id])
        before = await self._store.retweet_of(author_id, original.tweet_id)
        if before and not before.deleted:
            stored, new = before, False
        else:
            # Who took one back and makes another may wait, and doesn't count: else one account could heat any tweet.
            stored, new = await self._store_retweet(author_id, original, slow=before is not None)
        message = core.to_message(stored)
        after = [self._counting.add(core.counted(stored, 1))] if new else []
        after += [self._heat(original, 1)] if new and not before else []
        await asyncio.gather(self._show_author(message), *after)
        return message

    async def _store_retweet(self, author_id: int, original: StoredTweet, *, slow: bool) -> tuple[StoredTweet, bool]:
        """The retweet, and whether it is a new one."""
        retweet = StoredTweet(
            tweet_id=self._snowflakes.next_id(),
            author_id=author_id,
            text="",
            retweeted_tweet_id=original.tweet_id,
            retweeted_user_id=original.author_id,
        )
        outbox_max = self._outbox_slow_max if slow else self._outbox_max
        stored = await self._store.create_retweet(retweet, outbox_max, slow=slow)
        self._on_write(slow=slow)
        return stored, stored.tweet_id == retweet.tweet_id

    async def _retweet_hot(self, tweet_id: int, author_ids: Sequence[int]) -> Sequence[tweet_pb2.Tweet | StarlingError]:
        """As `_retweet`, for many, of a tweet whose retweets may wait."""
        original = await self._original(tweet_id)
        unknown, blocked = await self._accounts.refused(original.author_id, author_ids)

        async def store(author_id: int) -> tuple[StoredTweet, bool] | StarlingError:
            if author_id in unknown:
                return _no_such_user(author_id)
            if author_id in blocked:
                return _blocked()
            try:
                return await self._store_retweet(author_id, original, slow=True)
            except StarlingError as error:
                return error

        outcomes = await asyncio.gather(*map(store, author_ids))
        made = [outcome for outcome in outcomes if not isinstance(outcome, StarlingError)]
        messages = {stored.tweet_id: core.to_message(stored) for stored, _ in made}
        new = sum(is_new for _, is_new in made)
        after = [self._counting.add({original.tweet_id: Tally(retweets=new)}), self._heat(original, new)] if new else []
        await asyncio.gather(self._show_authors(list(messages.values())), *after)
        return [one if isinstance(one, StarlingError) else messages[one[0].tweet_id] for one in outcomes]

    async def _heat(self, original: StoredTweet, retweets: int) -> None:
        """Count more retweets: when so many retweet it, the next ones may wait. Without Valkey nobody counts."""
        with suppress(TimeoutError, UnavailableError):
            async with asyncio.timeout(_INLINE_SECONDS):
                if await self._velocity.retweeted(original.tweet_id, retweets) is Heat.HEATED:
                    log.info("tweet %d is hot", original.tweet_id)
                    await self._bodies.put([core.to_message(original)])  # Everybody is about to read it.

    async def UndoRetweet(self, request: tweet_pb2.UndoRetweetRequest, context: Any) -> tweet_pb2.UndoRetweetResponse:
        """See the proto."""
        original_id = await self._original_id(checks.required_id("tweet_id", request.tweet_id))
        change = await self._store.undo_retweet(principals.current.get().user_id, original_id)
        if change:
            await self._end(change)
        return tweet_pb2.UndoRetweetResponse(changed=bool(change and change.changed))

    async def Like(self, request: tweet_pb2.LikeRequest, context: Any) -> tweet_pb2.LikeResponse:
        """See the proto."""
        user_id = principals.current.get().user_id
        tweet_id = checks.required_id("tweet_id", request.tweet_id)
        original = await self._original(tweet_id)
        await self._require_access(user_id, [original.author_id])
        changed = await self._store.like(user_id, original.tweet_id)
        if changed:
            await self._counting.add({original.tweet_id: Tally(likes=1)})
        return tweet_pb2.LikeResponse(changed=changed)

    async def Unlike(self, request: tweet_pb2.UnlikeRequest, context: Any) -> tweet_pb2.UnlikeResponse:
        """See the proto."""
        original_id = await self._original_id(checks.required_id("tweet_id", request.tweet_id))
        changed = await self._store.unlike(principals.current.get().user_id, original_id)
        if changed:
            await self._counting.add({original_id: Tally(likes=-1)})
        return tweet_pb2.UnlikeResponse(changed=changed)

    async def BatchGetEngagements(
        self, request: tweet_pb2.BatchGetEngagementsRequest, context: Any
    ) -> tweet_pb2.BatchGetEngagementsResponse:
        """See the proto."""
        tweet_ids = checks.batch("tweet_ids", request.tweet_ids, _BATCH_MAX)
        done = await self._store.engagements(principals.current.get().user_id, tweet_ids)
        return tweet_pb2.BatchGetEngagementsResponse(
            liked_tweet_ids=[tweet_id for tweet_id in tweet_ids if tweet_id in done.liked],
            retweeted_tweet_ids=[tweet_id for tweet_id in tweet_ids if tweet_id in done.retweeted],
        )


def _no_such_user(user_id: int) -> NotFoundError:
    return NotFoundError("No such user.", reason="USER_NOT_FOUND", user_id=str(user_id))


def _blocked() -> PermissionDeniedError:
    return PermissionDeniedError("You block its author, or its author blocks you.", reason="BLOCKED")


def _own(change: Change | None, tweet_id: int, author_id: int) -> Change:
    """A write to a tweet of the caller's own. Raises NotFoundError, PermissionDeniedError."""
    if change is None or (change.tweet.deleted and change.tweet.author_id != author_id):
        raise _no_such_tweet(tweet_id)
    if change.tweet.author_id != author_id:
        raise PermissionDeniedError("Only its author may change a tweet.", reason="NOT_THE_AUTHOR")
    return change


def _no_such_tweet(tweet_id: int) -> NotFoundError:
    return NotFoundError("No such tweet.", reason="TWEET_NOT_FOUND", tweet_id=str(tweet_id))
