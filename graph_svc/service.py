"""GraphService: checks, then the store, then what readers have cached is made void before the reply."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from graph_svc import core
from graph_svc.modes import ModeMover
from graph_svc.store import AuthorState, DrainTask, GraphStore, Mode, ModeChange, User
from mesh import checks, failpoints, principals
from mesh.caches.viewer_versions import ViewerVersions
from mesh.clock import Clock
from mesh.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from mesh.ids import Snowflakes
from mesh.page_tokens import PageTokens
from mesh.server import ANYONE, OPERATORS, SERVICES, USERS, Allowed
from starling.graph.v1 import graph_pb2, graph_pb2_grpc

_SERVICE = "/starling.graph.v1.GraphService/"
ALLOWED: Allowed = {
    _SERVICE + "CreateUser": OPERATORS,
    _SERVICE + "GetUser": ANYONE,
    _SERVICE + "BatchGetUsers": ANYONE,
    _SERVICE + "Follow": USERS,
    _SERVICE + "Unfollow": USERS,
    _SERVICE + "Block": USERS,
    _SERVICE + "Unblock": USERS,
    _SERVICE + "Mute": USERS,
    _SERVICE + "Unmute": USERS,
    _SERVICE + "ListBlocked": USERS,
    _SERVICE + "ListMuted": USERS,
    _SERVICE + "CheckBlocks": SERVICES,
    _SERVICE + "ImportFollows": OPERATORS,
    _SERVICE + "ListFollowers": ANYONE,
    _SERVICE + "ListFollowing": ANYONE,
    _SERVICE + "StreamFollowers": SERVICES,
    _SERVICE + "GetViewerContext": SERVICES,
    _SERVICE + "GetAuthorMode": SERVICES,
    _SERVICE + "CompleteDrain": SERVICES,
    _SERVICE + "WatchPullAuthors": SERVICES,
    _SERVICE + "GetFanoutPolicy": OPERATORS | SERVICES,
    _SERVICE + "UpdateFanoutPolicy": OPERATORS,
}

_BATCH_MAX = 100
_EDGES_MAX = 1_000
_PAGE_MAX = 1_000
_CHECKS_MAX = 1_000
_FOLLOWERS_BELOW_MAX = 4_096
_WATCH_CHUNK = 4_096
_WATCH_SECONDS = 8.0
"""A watch ends after so long, within the grace that an old connection has; the reader calls again."""
_WATCH_POLL_SECONDS = 0.5
_HEARTBEAT_SECONDS = 3.0

_Page = Callable[[int, int, int], Awaitable[list[int]]]
_PageRequest = (
    graph_pb2.ListFollowersRequest
    | graph_pb2.ListFollowingRequest
    | graph_pb2.ListBlockedRequest
    | graph_pb2.ListMutedRequest
)


class GraphService(graph_pb2_grpc.GraphServiceServicer):
    """Ports come as arguments; see the proto for what each method does."""

    def __init__(
        self,
        *,
        store: GraphStore,
        versions: ViewerVersions,
        snowflakes: Snowflakes,
        page_tokens: PageTokens,
        clock: Clock,
        mover: ModeMover,
        stream_chunk: int = 4_096,
    ) -> None:
        self._mover = mover
        self._store = store
        self._versions = versions
        self._snowflakes = snowflakes
        self._page_tokens = page_tokens
        self._clock = clock
        self._stream_chunk = stream_chunk
        self.stopping = asyncio.Event()
        """Set when the process stops: watches end then, so that nothing waits for them."""

    async def CreateUser(self, request: graph_pb2.CreateUserRequest, context: Any) -> graph_pb2.CreateUserResponse:
        """See the proto."""
        handle = core.handle(request.handle)
        name = core.display_name(request.display_name, handle)
        user = User(self._snowflakes.next_id(), handle, name, self._clock.now_ms())
        if not await self._store.create_user(user):
            raise AlreadyExistsError("The handle is taken.", reason="HANDLE_TAKEN", handle=handle)
        return graph_pb2.CreateUserResponse(user=core.to_message(user))

    async def GetUser(self, request: graph_pb2.GetUserRequest, context: Any) -> graph_pb2.GetUserResponse:
        """See the proto."""
        match request.WhichOneof("key"):
            case "user_id":
                user = await self._user(checks.required_id("user_id", request.user_id))
            case "handle":
                found = await self._store.user_by_handle(core.handle(request.handle))
                if found is None:
                    raise NotFoundError("No such user.", reason="USER_NOT_FOUND", handle=request.handle)
                user = found
            case _:
                raise InvalidArgumentError("key", "One of user_id and handle is required.")
        return graph_pb2.GetUserResponse(user=core.to_message(user))

    async def _user(self, user_id: int) -> User:
        found = await self._store.users([user_id])
        if not found:
            raise NotFoundError("No such user.", reason="USER_NOT_FOUND", user_id=str(user_id))
        return found[0]

    async def BatchGetUsers(
        self, request: graph_pb2.BatchGetUsersRequest, context: Any
    ) -> graph_pb2.BatchGetUsersResponse:
        """See the proto."""
        users = await self._store.users(checks.batch("user_ids", request.user_ids, _BATCH_MAX))
        return graph_pb2.BatchGetUsersResponse(users=[core.to_message(user) for user in users])

    async def Follow(self, request: graph_pb2.FollowRequest, context: Any) -> graph_pb2.FollowResponse:
        """See the proto."""
        follower_id, followee_id = _pair("followee_id", request.followee_id, "follow")
        changed = await self._store.follow(follower_id, followee_id)
        if failpoints.ARMED:
            failpoints.hit("before-version-copy-deleted")
        # Also when nothing changed: this may be the retry of a call that got no further than the store.
        await self._versions.invalidate([follower_id])
        return graph_pb2.FollowResponse(changed=changed)

    async def Unfollow(self, request: graph_pb2.UnfollowRequest, context: Any) -> graph_pb2.UnfollowResponse:
        """See the proto."""
        follower_id, followee_id = _pair("followee_id", request.followee_id, "follow")
        changed = await self._store.unfollow(follower_id, followee_id)
        await self._versions.invalidate([follower_id])
        return graph_pb2.UnfollowResponse(changed=changed)

    async def Block(self, request: graph_pb2.BlockRequest, context: Any) -> graph_pb2.BlockResponse:
        """See the proto."""
        blocker_id, blocked_id = _pair("user_id", request.user_id, "block")
        changed = await self._store.block(blocker_id, blocked_id)
        await self._versions.invalidate([blocker_id, blocked_id])
        return graph_pb2.BlockResponse(changed=changed)

    async def Unblock(self, request: graph_pb2.UnblockRequest, context: Any) -> graph_pb2.UnblockResponse:
        """See the proto."""
        blocker_id, blocked_id = _pair("user_id", request.user_id, "block")
        changed = await self._store.unblock(blocker_id, blocked_id)
        await self._versions.invalidate([blocker_id, blocked_id])
        return graph_pb2.UnblockResponse(changed=changed)

    async def Mute(self, request: graph_pb2.MuteRequest, context: Any) -> graph_pb2.MuteResponse:
        """See the proto."""
        muter_id, muted_id = _pair("user_id", request.user_id, "mute")
        changed = await self._store.mute(muter_id, muted_id)
        await self._versions.invalidate([muter_id])
        return graph_pb2.MuteResponse(changed=changed)

    async def Unmute(self, request: graph_pb2.UnmuteRequest, context: Any) -> graph_pb2.UnmuteResponse:
        """See the proto."""
        muter_id, muted_id = _pair("user_id", request.user_id, "mute")
        changed = await self._store.unmute(muter_id, muted_id)
        await self._versions.invalidate([muter_id])
        return graph_pb2.UnmuteResponse(changed=changed)

    async def CheckBlocks(self, request: graph_pb2.CheckBlocksRequest, context: Any) -> graph_pb2.CheckBlocksResponse:
        """See the proto."""
        user_id = checks.required_id("user_id", request.user_id)
        other_ids = checks.batch("other_ids", request.other_ids, _CHECKS_MAX)
        blocked_by_ids, blocked_ids = await self._store.check_blocks(user_id, other_ids)
        return graph_pb2.CheckBlocksResponse(blocked_by_ids=blocked_by_ids, blocked_ids=blocked_ids)

    async def ImportFollows(
        self, requests: AsyncIterator[graph_pb2.ImportFollowsRequest], context: Any
    ) -> AsyncIterator[graph_pb2.ImportFollowsResponse]:
        """See the proto."""
        async for request in requests:
            if not 1 <= len(request.edges) <= _EDGES_MAX:
                raise InvalidArgumentError("edges", f"1 to {_EDGES_MAX:,} at once.")
            edges = [(edge.follower_id, edge.followee_id) for edge in request.edges]
            counts = await self._store.import_follows(edges)
            await self._versions.invalidate(sorted({follower_id for follower_id, _ in edges}))
            yield graph_pb2.ImportFollowsResponse(
                created=counts.created, existing=counts.existing, refused=counts.refused
            )

    async def ListFollowers(
        self, request: graph_pb2.ListFollowersRequest, context: Any
    ) -> graph_pb2.ListFollowersResponse:
        """See the proto."""
        user_id = checks.required_id("user_id", request.user_id)
        ids, token = await self._page("ListFollowers", user_id, request, self._store.list_followers)
        return graph_pb2.ListFollowersResponse(user_ids=ids, next_page_token=token)

    async def ListFollowing(
        self, request: graph_pb2.ListFollowingRequest, context: Any
    ) -> graph_pb2.ListFollowingResponse:
        """See the proto."""
        user_id = checks.required_id("user_id", request.user_id)
        ids, token = await self._page("ListFollowing", user_id, request, self._store.list_following)
        return graph_pb2.ListFollowingResponse(user_ids=ids, next_page_token=token)

    async def ListBlocked(self, request: graph_pb2.ListBlockedRequest, context: Any) -> graph_pb2.ListBlockedResponse:
        """See the proto."""
        user_id = principals.current.get().user_id
        ids, token = await self._page("ListBlocked", user_id, request, self._store.list_blocked)
        return graph_pb2.ListBlockedResponse(user_ids=ids, next_page_token=token)

    async def ListMuted(self, request: graph_pb2.ListMutedRequest, context: Any) -> graph_pb2.ListMutedResponse:
        """See the proto."""
        user_id = principals.current.get().user_id
        ids, token = await self._page("ListMuted", user_id, request, self._store.list_muted)
        return graph_pb2.ListMutedResponse(user_ids=ids, next_page_token=token)

    async def _page(self, rpc: str, user_id: int, request: _PageRequest, page: _Page) -> tuple[Sequence[int], str]:
        size = checks.page_size(request.page_size, maximum=_PAGE_MAX)
        binding = (str(principals.current.get()), user_id)
        after = self._page_tokens.decode(rpc, binding, request.page_token) if request.page_token else 0
        await self._user(user_id)
        ids = await page(user_id, after, size + 1)
        if len(ids) <= size:
            return ids, ""
        return ids[:size], self._page_tokens.encode(rpc, binding, ids[size - 1])

    async def StreamFollowers(
        self, request: graph_pb2.StreamFollowersRequest, context: Any
    ) -> AsyncIterator[graph_pb2.StreamFollowersResponse]:
        """See the proto. One chunk in memory at a time."""
        author_id = checks.required_id("author_id", request.author_id)
        state = await self._author_state(author_id)
        buckets = [request.bucket] if request.HasField("bucket") else range(state.bucket_count)
        for bucket in buckets:
            after = 0
            while True:  # `after` rises with each chunk.
                ids = await self._store.followers(author_id, bucket, after, self._stream_chunk)
                if ids:
                    yield graph_pb2.StreamFollowersResponse(follower_ids=ids)
                    after = ids[-1]
                if len(ids) < self._stream_chunk:
                    break

    async def GetViewerContext(
        self, request: graph_pb2.GetViewerContextRequest, context: Any
    ) -> graph_pb2.GetViewerContextResponse:
        """See the proto."""
        viewer_id = checks.required_id("viewer_id", request.viewer_id)
        viewer = await self._store.viewer_context(viewer_id)
        if viewer is None:
            raise NotFoundError("No such user.", reason="USER_NOT_FOUND", user_id=str(viewer_id))
        return graph_pb2.GetViewerContextResponse(
            version=viewer.version,
            followee_ids=viewer.followee_ids,
            since=viewer.since,
            blocked_ids=viewer.blocked_ids,
            muted_ids=viewer.muted_ids,
        )

    async def _author_state(self, author_id: int) -> AuthorState:
        state = await self._store.author_state(author_id)
        if state is None:
            raise NotFoundError("No such user.", reason="USER_NOT_FOUND", user_id=str(author_id))
        return state

    async def GetAuthorMode(
        self, request: graph_pb2.GetAuthorModeRequest, context: Any
    ) -> graph_pb2.GetAuthorModeResponse:
        """See the proto."""
        author_id = checks.required_id("author_id", request.author_id)
        state = await self._author_state(author_id)
        self._mover.asked(author_id)
        response = graph_pb2.GetAuthorModeResponse(
            mode=core.mode_message(state.mode),
            epoch=state.epoch,
            age_seconds=max(0, self._clock.now_ms() - state.since_ms) / 1_000,
            bucket_count=state.bucket_count,
            slow=self._mover.pressure.slow and state.bucket_count > 1,
        )
        below = min(request.followers_below, _FOLLOWERS_BELOW_MAX)
        if below and state.bucket_count == 1 and state.mode is not Mode.PULL:
            ids = await self._store.followers(author_id, 0, 0, below)
            if len(ids) < below:
                response.followers.follower_ids.extend(ids)
                response.followers.SetInParent()
        return response

    async def CompleteDrain(
        self, request: graph_pb2.CompleteDrainRequest, context: Any
    ) -> graph_pb2.CompleteDrainResponse:
        """See the proto."""
        author_id = checks.required_id("author_id", request.author_id)
        task = DrainTask(author_id, request.epoch, request.bucket)
        completed = await self._store.complete_drain(task, self._clock.now_ms())
        return graph_pb2.CompleteDrainResponse(completed=completed)

    async def WatchPullAuthors(
        self, request: graph_pb2.WatchPullAuthorsRequest, context: Any
    ) -> AsyncIterator[graph_pb2.WatchPullAuthorsResponse]:
        """See the proto. `as_of_ms` is taken before the store is read, so that it never promises too much."""
        as_of = self._clock.now_ms()
        sequence = await self._store.mode_sequence()  # Before the snapshot: a change in between comes twice.
        after, complete = 0, False
        while not complete:  # `after` rises with each chunk.
            ids = await self._store.pulled_authors(after, _WATCH_CHUNK)
            after, complete = (ids[-1] if ids else after), len(ids) < _WATCH_CHUNK
            snapshot = graph_pb2.PullAuthorsSnapshot(author_ids=ids, complete=complete)
            yield graph_pb2.WatchPullAuthorsResponse(as_of_ms=as_of, snapshot=snapshot)
        end = time.monotonic() + _WATCH_SECONDS
        said = time.monotonic()
        while time.monotonic() < end and not self.stopping.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), _WATCH_POLL_SECONDS)
            as_of = self._clock.now_ms()
            changes = await self._store.mode_changes(sequence, _WATCH_CHUNK)
            if changes or time.monotonic() - said >= _HEARTBEAT_SECONDS:
                yield _changes_message(as_of, changes)
                sequence = changes[-1].sequence if changes else sequence
                said = time.monotonic()

    async def GetFanoutPolicy(
        self, request: graph_pb2.GetFanoutPolicyRequest, context: Any
    ) -> graph_pb2.GetFanoutPolicyResponse:
        """See the proto."""
        pulled = len(await self._store.pulled_authors(0, _WATCH_CHUNK))
        return core.policy_response(await self._mover.policy(), self._mover.pressure, pulled)

    async def UpdateFanoutPolicy(
        self, request: graph_pb2.UpdateFanoutPolicyRequest, context: Any
    ) -> graph_pb2.UpdateFanoutPolicyResponse:
        """See the proto."""
        policy = core.fanout_policy(request, await self._mover.policy())
        await self._store.set_fanout_policy(policy)
        return graph_pb2.UpdateFanoutPolicyResponse(policy=core.policy_message(policy))


def _changes_message(as_of_ms: int, changes: Sequence[ModeChange]) -> graph_pb2.WatchPullAuthorsResponse:
    message = graph_pb2.WatchPullAuthorsResponse(as_of_ms=as_of_ms, changes=graph_pb2.PullAuthorsChanges())
    message.changes.added.extend(change.author_id for change in changes if change.mode is not Mode.PUSH)
    message.changes.removed.extend(change.author_id for change in changes if change.mode is Mode.PUSH)
    return message


def _pair(field: str, other_id: int, verb: str) -> tuple[int, int]:
    """The calling user, and the other whom a request names in `field`. Raises InvalidArgumentError (SELF_<VERB>)."""
    user_id = principals.current.get().user_id
    if checks.required_id(field, other_id) == user_id:
        raise InvalidArgumentError(field, f"Nobody {verb}s themselves.", reason=f"SELF_{verb.upper()}")
    return user_id, other_id
