"""Bad input to every RPC: the status and the field that are due, nothing stored, and never a stack trace."""

import sqlite3
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from fanout_svc.service import ALLOWED as FANOUT_ALLOWED
from graph_svc.service import ALLOWED as GRAPH_ALLOWED
from mesh import principals
from mesh.channels import details_of, reason_of
from mesh.principals import OPERATOR, Principal, service
from mesh.server import Allowed
from starling.fanout.v1 import fanout_pb2 as f
from starling.graph.v1 import graph_pb2 as g
from starling.timeline.v1 import timeline_pb2 as h
from starling.tweet.v1 import tweet_pb2 as t
from tests.harness import SECRET, Mesh
from timeline_svc.service import ALLOWED as TIMELINE_ALLOWED
from tweet_svc.service import ALLOWED as TWEET_ALLOWED

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
SERVICE = service("test")
UNKNOWN = 1 << 62
HUGE = (1 << 64) - 1
UUID = "6fd3b2a4-0c5e-4f6e-9d55-0b6f8f9c1a2b"


@dataclass(frozen=True)
class Bad:
    """A call and what is due. `field`: in BadRequest (INVALID_ARGUMENT), else `reason` in ErrorInfo."""

    rpc: str
    request: Message | list[Message]
    code: grpc.StatusCode
    field: str = ""
    reason: str = ""
    caller: Principal | None = None
    """None: a registered user."""

    def __str__(self) -> str:
        return f"{self.rpc} {str(self.request)[:40]!r} {self.field or self.reason}"


def text(value: str, **more: Any) -> Bad:
    return Bad("tweet.CreateTweet", t.CreateTweetRequest(text=value, **more), INVALID, "text")


def create(field: str, **fields: Any) -> Bad:
    return Bad("tweet.CreateTweet", t.CreateTweetRequest(text="hi", **fields), INVALID, field)


def edit(field: str, **fields: Any) -> Bad:
    return Bad("tweet.UpdateTweet", t.UpdateTweetRequest(**fields), INVALID, field)


def policy(threshold: int, minimum: int = 0) -> g.UpdateFanoutPolicyRequest:
    return g.UpdateFanoutPolicyRequest(policy=g.FanoutPolicy(pull_threshold=threshold, pull_threshold_min=minimum))


BAD = [
    text(""),
    text(" \n\t "),
    text("a" * 281),
    text("x" * 5_001),
    text("故" * 141),
    text("😊" * 200),
    text("nul \0 inside"),
    text("non-character \ufffe"),
    text("non-character \uffff"),
    create("media_ids", media_ids=["a", "b", "c", "d", "e"]),
    create("media_ids", media_ids=["a", "a"]),
    create("media_ids[1]", media_ids=["a", "no spaces"]),
    create("media_ids[0]", media_ids=["m" * 65]),
    create("media_ids[0]", media_ids=[""]),
    create("request_id", request_id="not a uuid"),
    create("request_id", request_id=UUID[:-1]),
    create("request_id", request_id="x" * 10_000),
    Bad("tweet.CreateTweet", t.CreateTweetRequest(text="hi", in_reply_to_tweet_id=UNKNOWN), NOT_FOUND, reason="TWEET_NOT_FOUND"),
    Bad("tweet.CreateTweet", t.CreateTweetRequest(text="hi", in_reply_to_tweet_id=HUGE), NOT_FOUND, reason="TWEET_NOT_FOUND"),
    Bad("tweet.CreateTweet", t.CreateTweetRequest(text="hi", quoted_tweet_id=UNKNOWN), NOT_FOUND, reason="TWEET_NOT_FOUND"),
    Bad("tweet.CreateTweet", t.CreateTweetRequest(text="hi"), NOT_FOUND, reason="USER_NOT_FOUND", caller=principals.user(UNKNOWN)),
    Bad("tweet.GetTweet", t.GetTweetRequest(), INVALID, "tweet_id"),
    Bad("tweet.GetTweet", t.GetTweetRequest(tweet_id=UNKNOWN), NOT_FOUND, reason="TWEET_NOT_FOUND"),
    Bad("tweet.GetTweet", t.GetTweetRequest(tweet_id=HUGE), NOT_FOUND, reason="TWEET_NOT_FOUND"),
    Bad("tweet.BatchGetTweets", t.BatchGetTweetsRequest(), INVALID, "tweet_ids"),
    Bad("tweet.BatchGetTweets", t.BatchGetTweetsRequest(tweet_ids=range(1, 102)), INVALID, "tweet_ids"),
    Bad("tweet.BatchGetTweets", t.BatchGetTweetsRequest(tweet_ids=[1, 0]), INVALID, "tweet_ids"),
    Bad("tweet.HydrateTweets", [t.HydrateTweetsRequest()], INVALID, "tweet_ids", caller=SERVICE),
    Bad("tweet.HydrateTweets", [t.HydrateTweetsRequest(tweet_ids=range(1, 202))], INVALID, "tweet_ids", caller=SERVICE),
    Bad("tweet.ListUserTweets", t.ListUserTweetsRequest(), INVALID, "user_id"),
    Bad("tweet.ListUserTweets", t.ListUserTweetsRequest(user_id=UNKNOWN), NOT_FOUND, reason="USER_NOT_FOUND"),
    Bad("tweet.ListUserTweets", t.ListUserTweetsRequest(user_id=1, page_size=-1), INVALID, "page_size"),
    Bad("tweet.ListUserTweets", t.ListUserTweetsRequest(user_id=1, page_token="garbage"), INVALID, "page_token"),
    Bad("tweet.ListUserTweets", t.ListUserTweetsRequest(user_id=1, page_token="x" * 10_000), INVALID, "page_token"),
    Bad("tweet.ListUserTweets", t.ListUserTweetsRequest(user_id=1, page_token="ünïcödé"), INVALID, "page_token"),
    Bad("tweet.StreamAuthorTweets", t.StreamAuthorTweetsRequest(), INVALID, "author_ids", caller=SERVICE),
    Bad("tweet.StreamAuthorTweets", t.StreamAuthorTweetsRequest(author_ids=range(1, 5_003)), INVALID, "author_ids", caller=SERVICE),
    Bad("tweet.StreamAuthorTweets", t.StreamAuthorTweetsRequest(author_ids=[1], limit=-1), INVALID, "limit", caller=SERVICE),
    Bad("tweet.StreamAuthorTweets", t.StreamAuthorTweetsRequest(author_ids=[1], limit=10**9), INVALID, "limit", caller=SERVICE),
    Bad("tweet.DeleteTweet", t.DeleteTweetRequest(), INVALID, "tweet_id"),
    Bad("tweet.DeleteTweet", t.DeleteTweetRequest(tweet_id=UNKNOWN), NOT_FOUND, reason="TWEET_NOT_FOUND"),
    edit("tweet.tweet_id", tweet=t.Tweet(text="hi")),
    edit("tweet.tweet_id"),
    edit("tweet.text", tweet=t.Tweet(tweet_id=1)),
    edit("tweet.text", tweet=t.Tweet(tweet_id=1, text="a" * 281)),
    edit("tweet.text", tweet=t.Tweet(tweet_id=1, text="x" * 5_001)),
    edit("tweet.text", tweet=t.Tweet(tweet_id=1, text="nul \0 inside")),
    edit("update_mask", tweet=t.Tweet(tweet_id=1, text="hi"), update_mask=FieldMask(paths=["text", "author_id"])),
    edit("update_mask", tweet=t.Tweet(tweet_id=1, text="hi"), update_mask=FieldMask(paths=["*"])),
    Bad("tweet.UpdateTweet", t.UpdateTweetRequest(tweet=t.Tweet(tweet_id=UNKNOWN, text="hi")), NOT_FOUND, reason="TWEET_NOT_FOUND"),
    Bad("tweet.UpdateTweet", t.UpdateTweetRequest(tweet=t.Tweet(tweet_id=HUGE, text="hi")), NOT_FOUND, reason="TWEET_NOT_FOUND"),
    Bad("tweet.ListTweetRevisions", t.ListTweetRevisionsRequest(), INVALID, "tweet_id"),
    Bad("tweet.ListTweetRevisions", t.ListTweetRevisionsRequest(tweet_id=HUGE), NOT_FOUND, reason="TWEET_NOT_FOUND"),
    Bad("tweet.ListTweetRevisions", t.ListTweetRevisionsRequest(tweet_id=1, page_size=-1), INVALID, "page_size"),
    Bad("tweet.ListTweetRevisions", t.ListTweetRevisionsRequest(tweet_id=1, page_token="x"), INVALID, "page_token"),
    Bad("tweet.Retweet", t.RetweetRequest(), INVALID, "tweet_id"),
    Bad("tweet.Retweet", t.RetweetRequest(tweet_id=UNKNOWN), NOT_FOUND, reason="TWEET_NOT_FOUND"),
    Bad("tweet.Retweet", t.RetweetRequest(tweet_id=HUGE), NOT_FOUND, reason="TWEET_NOT_FOUND"),
    Bad("tweet.UndoRetweet", t.UndoRetweetRequest(), INVALID, "tweet_id"),
    Bad("tweet.Like", t.LikeRequest(), INVALID, "tweet_id"),
    Bad("tweet.Like", t.LikeRequest(tweet_id=UNKNOWN), NOT_FOUND, reason="TWEET_NOT_FOUND"),
    Bad("tweet.Like", t.LikeRequest(tweet_id=HUGE), NOT_FOUND, reason="TWEET_NOT_FOUND"),
    Bad("tweet.Unlike", t.UnlikeRequest(), INVALID, "tweet_id"),
    Bad("tweet.BatchGetEngagements", t.BatchGetEngagementsRequest(), INVALID, "tweet_ids"),
    Bad("tweet.BatchGetEngagements", t.BatchGetEngagementsRequest(tweet_ids=range(1, 102)), INVALID, "tweet_ids"),
    Bad("tweet.BatchGetEngagements", t.BatchGetEngagementsRequest(tweet_ids=[1, 0]), INVALID, "tweet_ids"),
    Bad("graph.CreateUser", g.CreateUserRequest(), INVALID, "handle", caller=OPERATOR),
    Bad("graph.CreateUser", g.CreateUserRequest(handle="x" * 16), INVALID, "handle", caller=OPERATOR),
    Bad("graph.CreateUser", g.CreateUserRequest(handle="sp ace"), INVALID, "handle", caller=OPERATOR),
    Bad("graph.CreateUser", g.CreateUserRequest(handle="ünder"), INVALID, "handle", caller=OPERATOR),
    Bad("graph.CreateUser", g.CreateUserRequest(handle="line\n"), INVALID, "handle", caller=OPERATOR),
    Bad("graph.CreateUser", g.CreateUserRequest(handle="ok", display_name="x" * 51), INVALID, "display_name", caller=OPERATOR),
    Bad("graph.CreateUser", g.CreateUserRequest(handle="ok", display_name="a\0b"), INVALID, "display_name", caller=OPERATOR),
    Bad("graph.CreateUser", g.CreateUserRequest(handle="ok", display_name="\uffff"), INVALID, "display_name", caller=OPERATOR),
    Bad("graph.CreateUser", g.CreateUserRequest(handle="ALICE"), grpc.StatusCode.ALREADY_EXISTS, reason="HANDLE_TAKEN", caller=OPERATOR),
    Bad("graph.GetUser", g.GetUserRequest(), INVALID, "key"),
    Bad("graph.GetUser", g.GetUserRequest(user_id=0), INVALID, "user_id"),
    Bad("graph.GetUser", g.GetUserRequest(handle=""), INVALID, "handle"),
    Bad("graph.GetUser", g.GetUserRequest(user_id=HUGE), NOT_FOUND, reason="USER_NOT_FOUND"),
    Bad("graph.GetUser", g.GetUserRequest(handle="nobody"), NOT_FOUND, reason="USER_NOT_FOUND"),
    Bad("graph.BatchGetUsers", g.BatchGetUsersRequest(), INVALID, "user_ids"),
    Bad("graph.BatchGetUsers", g.BatchGetUsersRequest(user_ids=range(1, 102)), INVALID, "user_ids"),
    Bad("graph.Follow", g.FollowRequest(), INVALID, "followee_id"),
    Bad("graph.Follow", g.FollowRequest(followee_id=UNKNOWN), NOT_FOUND, reason="USER_NOT_FOUND"),
    Bad("graph.Follow", g.FollowRequest(followee_id=HUGE), NOT_FOUND, reason="USER_NOT_FOUND"),
    Bad("graph.Unfollow", g.UnfollowRequest(), INVALID, "followee_id"),
    Bad("graph.Unfollow", g.UnfollowRequest(followee_id=UNKNOWN), NOT_FOUND, reason="USER_NOT_FOUND"),
    Bad("graph.Block", g.BlockRequest(), INVALID, "user_id"),
    Bad("graph.Block", g.BlockRequest(user_id=UNKNOWN), NOT_FOUND, reason="USER_NOT_FOUND"),
    Bad("graph.Block", g.BlockRequest(user_id=HUGE), NOT_FOUND, reason="USER_NOT_FOUND"),
    Bad("graph.Unblock", g.UnblockRequest(), INVALID, "user_id"),
    Bad("graph.Unblock", g.UnblockRequest(user_id=UNKNOWN), NOT_FOUND, reason="USER_NOT_FOUND"),
    Bad("graph.Mute", g.MuteRequest(), INVALID, "user_id"),
    Bad("graph.Mute", g.MuteRequest(user_id=UNKNOWN), NOT_FOUND, reason="USER_NOT_FOUND"),
    Bad("graph.Mute", g.MuteRequest(user_id=HUGE), NOT_FOUND, reason="USER_NOT_FOUND"),
    Bad("graph.Unmute", g.UnmuteRequest(), INVALID, "user_id"),
    Bad("graph.Unmute", g.UnmuteRequest(user_id=UNKNOWN), NOT_FOUND, reason="USER_NOT_FOUND"),
    Bad("graph.ListBlocked", g.ListBlockedRequest(page_size=-1), INVALID, "page_size"),
    Bad("graph.ListBlocked", g.ListBlockedRequest(page_token="x"), INVALID, "page_token"),
    Bad("graph.ListBlocked", g.ListBlockedRequest(), NOT_FOUND, reason="USER_NOT_FOUND", caller=principals.user(UNKNOWN)),
    Bad("graph.ListMuted", g.ListMutedRequest(page_size=-1), INVALID, "page_size"),
    Bad("graph.ListMuted", g.ListMutedRequest(page_token="x"), INVALID, "page_token"),
    Bad("graph.ListMuted", g.ListMutedRequest(), NOT_FOUND, reason="USER_NOT_FOUND", caller=principals.user(UNKNOWN)),
    Bad("graph.CheckBlocks", g.CheckBlocksRequest(other_ids=[1]), INVALID, "user_id", caller=SERVICE),
    Bad("graph.CheckBlocks", g.CheckBlocksRequest(user_id=1), INVALID, "other_ids", caller=SERVICE),
    Bad("graph.CheckBlocks", g.CheckBlocksRequest(user_id=1, other_ids=[1, 0]), INVALID, "other_ids", caller=SERVICE),
    Bad("graph.CheckBlocks", g.CheckBlocksRequest(user_id=1, other_ids=range(1, 1_002)), INVALID, "other_ids", caller=SERVICE),
    Bad("graph.ImportFollows", [g.ImportFollowsRequest()], INVALID, "edges", caller=OPERATOR),
    Bad("graph.ImportFollows", [g.ImportFollowsRequest(edges=[g.Edge()] * 1_001)], INVALID, "edges", caller=OPERATOR),
    Bad("graph.ListFollowers", g.ListFollowersRequest(), INVALID, "user_id"),
    Bad("graph.ListFollowers", g.ListFollowersRequest(user_id=UNKNOWN), NOT_FOUND, reason="USER_NOT_FOUND"),
    Bad("graph.ListFollowers", g.ListFollowersRequest(user_id=1, page_size=-1), INVALID, "page_size"),
    Bad("graph.ListFollowers", g.ListFollowersRequest(user_id=1, page_token="x"), INVALID, "page_token"),
    Bad("graph.ListFollowing", g.ListFollowingRequest(), INVALID, "user_id"),
    Bad("graph.ListFollowing", g.ListFollowingRequest(user_id=UNKNOWN), NOT_FOUND, reason="USER_NOT_FOUND"),
    Bad("graph.ListFollowing", g.ListFollowingRequest(user_id=1, page_size=-1), INVALID, "page_size"),
    Bad("graph.ListFollowing", g.ListFollowingRequest(user_id=1, page_token="x"), INVALID, "page_token"),
    Bad("graph.StreamFollowers", g.StreamFollowersRequest(), INVALID, "author_id", caller=SERVICE),
    Bad("graph.StreamFollowers", g.StreamFollowersRequest(author_id=UNKNOWN), NOT_FOUND, reason="USER_NOT_FOUND", caller=SERVICE),
    Bad("graph.GetViewerContext", g.GetViewerContextRequest(), INVALID, "viewer_id", caller=SERVICE),
    Bad("graph.GetViewerContext", g.GetViewerContextRequest(viewer_id=HUGE), NOT_FOUND, reason="USER_NOT_FOUND", caller=SERVICE),
    Bad("graph.GetAuthorMode", g.GetAuthorModeRequest(), INVALID, "author_id", caller=SERVICE),
    Bad("graph.GetAuthorMode", g.GetAuthorModeRequest(author_id=UNKNOWN), NOT_FOUND, reason="USER_NOT_FOUND", caller=SERVICE),
    Bad("graph.CompleteDrain", g.CompleteDrainRequest(), INVALID, "author_id", caller=SERVICE),
    Bad("graph.UpdateFanoutPolicy", g.UpdateFanoutPolicyRequest(), INVALID, "policy.pull_threshold", caller=OPERATOR),
    Bad("graph.UpdateFanoutPolicy", policy(1), INVALID, "policy.pull_threshold", caller=OPERATOR),
    Bad("graph.UpdateFanoutPolicy", policy(10**9 + 1), INVALID, "policy.pull_threshold", caller=OPERATOR),
    Bad("graph.UpdateFanoutPolicy", policy(10, 1), INVALID, "policy.pull_threshold_min", caller=OPERATOR),
    Bad("graph.UpdateFanoutPolicy", policy(10, 11), INVALID, "policy.pull_threshold_min", caller=OPERATOR),
    Bad("graph.UpdateFanoutPolicy", policy(10, HUGE), INVALID, "policy.pull_threshold_min", caller=OPERATOR),
    Bad("timeline.ListHomeTimeline", h.ListHomeTimelineRequest(page_size=-1), INVALID, "page_size"),
    Bad("timeline.ListHomeTimeline", h.ListHomeTimelineRequest(page_token="garbage"), INVALID, "page_token"),
    Bad("timeline.ListHomeTimeline", h.ListHomeTimelineRequest(page_token="A" * 10_000), INVALID, "page_token"),
    Bad("timeline.ListHomeTimeline", h.ListHomeTimelineRequest(page_token="\uffff"), INVALID, "page_token"),
    Bad("timeline.ListHomeTimeline", h.ListHomeTimelineRequest(read_your_write_token="x"), INVALID, "read_your_write_token"),
    Bad("timeline.ListHomeTimeline", h.ListHomeTimelineRequest(read_your_write_token="9" * 10_000), INVALID, "read_your_write_token"),
    Bad("timeline.ListHomeTimeline", h.ListHomeTimelineRequest(read_your_write_token=str(1 << 64)), INVALID, "read_your_write_token"),
    Bad("timeline.ListHomeTimeline", h.ListHomeTimelineRequest(), NOT_FOUND, reason="USER_NOT_FOUND", caller=principals.user(UNKNOWN)),
    Bad("timeline.WatchHomeTimeline", h.WatchHomeTimelineRequest(), NOT_FOUND, reason="USER_NOT_FOUND", caller=principals.user(UNKNOWN)),
    Bad("fanout.StreamDeliveries", [f.StreamDeliveriesRequest(added_viewer_ids=[0])], INVALID, "added_viewer_ids", caller=SERVICE),
    Bad("fanout.StreamDeliveries", [f.StreamDeliveriesRequest(added_viewer_ids=range(1, 10_002))], INVALID, "added_viewer_ids", caller=SERVICE),
    Bad("timeline.VerifyHomeTimeline", h.VerifyHomeTimelineRequest(), INVALID, "viewer_id", caller=OPERATOR),
    Bad("timeline.VerifyHomeTimeline", h.VerifyHomeTimelineRequest(viewer_id=UNKNOWN), NOT_FOUND, reason="USER_NOT_FOUND", caller=OPERATOR),
    Bad("timeline.ExplainHomeTimelineItem", h.ExplainHomeTimelineItemRequest(viewer_id=UNKNOWN, tweet_id=1), NOT_FOUND, reason="USER_NOT_FOUND", caller=OPERATOR),
    Bad("timeline.ExplainHomeTimelineItem", h.ExplainHomeTimelineItemRequest(tweet_id=1), INVALID, "viewer_id", caller=OPERATOR),
    Bad("timeline.ExplainHomeTimelineItem", h.ExplainHomeTimelineItemRequest(), INVALID, "tweet_id"),
    Bad("timeline.RebuildHomeTimeline", h.RebuildHomeTimelineRequest(), INVALID, "viewer_id", caller=OPERATOR),
    Bad("timeline.RebuildHomeTimeline", h.RebuildHomeTimelineRequest(viewer_id=UNKNOWN), NOT_FOUND, reason="USER_NOT_FOUND", caller=OPERATOR),
]  # fmt: skip

STREAMED = {
    *("HydrateTweets", "ImportFollows", "StreamAuthorTweets", "StreamDeliveries", "StreamFollowers"),
    *("WatchHomeTimeline", "WatchPullAuthors"),
}
ALL_ALLOWED: Allowed = {**TWEET_ALLOWED, **GRAPH_ALLOWED, **TIMELINE_ALLOWED, **FANOUT_ALLOWED}
REQUESTS: dict[str, Callable[[], Message]] = {
    method.rpartition("/")[2]: getattr(module, method.rpartition("/")[2] + "Request")
    for module, allowed in [(t, TWEET_ALLOWED), (g, GRAPH_ALLOWED), (h, TIMELINE_ALLOWED), (f, FANOUT_ALLOWED)]
    for method in allowed
}


async def call(mesh: Mesh, rpc: str, request: Message | list[Message], **how: Any) -> None:
    stubs: dict[str, Any] = {
        "tweet": mesh.tweets,
        "graph": mesh.graph,
        "timeline": mesh.timeline,
        "fanout": mesh.fanout,
    }
    area, _, name = rpc.partition(".")
    method = getattr(stubs[area], name)
    if name not in STREAMED:
        await method(request, **how)
        return
    stream = method(requests_of(request), **how) if isinstance(request, list) else method(request, **how)
    async for _ in stream:
        pass


async def requests_of(requests: list[Message]) -> AsyncIterator[Message]:
    for request in requests:
        yield request


def rows(path: str) -> dict[str, int]:
    """How many rows each table has; leases aside, which come and go by themselves."""
    with sqlite3.connect(path) as connection:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
            for name in tables
            if name not in {"worker_leases", "sqlite_sequence"}
        }


async def everything_stored(mesh: Mesh) -> list[object]:
    keys = sorted(await mesh.valkey.call("KEYS", f"{mesh.valkey.key_prefix}*"))
    return [rows(mesh.tweet_store._database._path), rows(mesh.graph_store._database._path), keys]


def fields_of(error: grpc.aio.AioRpcError) -> list[str]:
    bad = error_details_pb2.BadRequest()
    found = [bad for detail in details_of(error) if detail.Unpack(bad)]
    return [violation.field for violation in found[0].field_violations] if found else []


@pytest.mark.parametrize("bad", BAD, ids=str)
async def test_bad_input_is_refused_by_name_and_leaves_nothing(mesh: Mesh, bad: Bad) -> None:
    alice = await mesh.create_user("alice")
    before = await everything_stored(mesh)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(mesh, bad.rpc, bad.request, **mesh.as_(bad.caller or alice))
    assert refused.value.code() is bad.code
    if bad.field:
        assert fields_of(refused.value) == [bad.field]
        assert bad.field in str(refused.value.details())
    else:
        assert reason_of(refused.value) == bad.reason
    assert "Traceback" not in str(refused.value.details())
    after = await everything_stored(mesh)
    assert after[:2] == before[:2]
    if bad.code is INVALID:
        assert after == before


def test_every_rpc_is_met_by_bad_input() -> None:
    named = {bad.rpc.partition(".")[2] for bad in BAD}
    without_fields = {"GetFanoutStatus", "GetFanoutPolicy", "WatchPullAuthors"}
    assert named | without_fields == set(REQUESTS)


async def test_a_page_size_of_a_billion_is_the_maximum(mesh: Mesh) -> None:
    alice = await mesh.create_user("alice")
    for number in range(101):
        await mesh.post(alice, f"tweet {number}")
    assert len((await mesh.home(alice, 10**9)).items) == 100
    assert len((await mesh.home(alice, 0)).items) == 20


async def test_someone_elses_page_token_is_no_token(mesh: Mesh) -> None:
    alice, bob = await mesh.create_user("alice"), await mesh.create_user("bob")
    await mesh.follow(bob, alice)
    for number in range(3):
        await mesh.post(alice, f"tweet {number}")
    token = (await mesh.home(alice, 1)).next_page_token
    assert (await mesh.home(alice, 1, token)).items
    for changed in (token, token[:-1], token + "A", token.swapcase()):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.home(bob, 1, changed)
        assert (refused.value.code(), fields_of(refused.value)) == (INVALID, ["page_token"])


@pytest.mark.parametrize("path", sorted(ALL_ALLOWED))
async def test_no_rpc_works_without_a_good_token_of_the_right_kind(mesh: Mesh, path: str) -> None:
    alice = await mesh.create_user("alice")
    area, name = path.split("/")[1].split(".")[1], path.rpartition("/")[2]
    request = REQUESTS[name]()
    sent = [request] if name in {"HydrateTweets", "ImportFollows", "StreamDeliveries"} else request
    good = principals.mint(SECRET, principals.user(alice))
    of_others = principals.mint("another secret that is long enough, too", principals.user(alice))
    expired = principals.mint(SECRET, principals.user(alice), lifetime_seconds=-60)
    unsigned = "eyJhbGciOiJub25lIiwidHlwIjoiSldUIn0.eyJzdWIiOiJvcGVyYXRvciJ9."
    for header in (None, "", good, "Basic " + good, "Bearer", "Bearer x", "Bearer " + of_others):
        await refused_as(mesh, f"{area}.{name}", sent, header, grpc.StatusCode.UNAUTHENTICATED)
    for token in (expired, unsigned, "x" * 5_000):
        await refused_as(mesh, f"{area}.{name}", sent, "Bearer " + token, grpc.StatusCode.UNAUTHENTICATED)
    for caller in (principals.user(alice), SERVICE, OPERATOR):
        if caller.kind not in ALL_ALLOWED[path]:
            header = "Bearer " + principals.mint(SECRET, caller)
            await refused_as(mesh, f"{area}.{name}", sent, header, grpc.StatusCode.PERMISSION_DENIED)


async def refused_as(
    mesh: Mesh, rpc: str, request: Message | list[Message], header: str | None, code: grpc.StatusCode
) -> None:
    metadata = () if header is None else (("authorization", header),)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(mesh, rpc, request, metadata=metadata, timeout=5)
    assert refused.value.code() is code, header


async def test_t3_bytes_that_are_no_text_are_refused(mesh: Mesh) -> None:
    alice = await mesh.create_user("alice")
    before = await everything_stored(mesh)
    raw: Any = mesh.tweet_channel.unary_unary("/starling.tweet.v1.TweetService/CreateTweet")
    for text_bytes in (b"\xff\xfe", b"\xed\xa0\xbd", b"ok \xc0\x80"):  # no UTF-8, a lone surrogate, an overlong NUL
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await raw(b"\x0a" + bytes([len(text_bytes)]) + text_bytes, **mesh.as_(alice))
        assert (refused.value.code(), fields_of(refused.value)) == (INVALID, ["request"])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await raw(b"\x0a\xff", **mesh.as_(alice))
    assert refused.value.code() is INVALID
    assert await everything_stored(mesh) == before


async def test_nobody_deletes_anothers_tweet(mesh: Mesh) -> None:
    alice, bob = await mesh.create_user("alice"), await mesh.create_user("bob")
    tweet = await mesh.post(alice)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.delete(bob, tweet.tweet_id)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert await mesh.walk(alice) == [tweet.tweet_id]
    await mesh.delete(alice, tweet.tweet_id)
    await mesh.delete(alice, tweet.tweet_id)  # A retry.
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        await mesh.delete(bob, tweet.tweet_id)
    assert gone.value.code() is NOT_FOUND


async def test_nobody_follows_themselves(mesh: Mesh) -> None:
    alice = await mesh.create_user("alice")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.follow(alice, alice)
    assert (refused.value.code(), fields_of(refused.value)) == (INVALID, ["followee_id"])
    assert reason_of(refused.value) == "SELF_FOLLOW"


@pytest.mark.parametrize("rpc", ["Block", "Unblock", "Mute", "Unmute"])
async def test_nobody_blocks_or_mutes_themselves(mesh: Mesh, rpc: str) -> None:
    alice = await mesh.create_user("alice")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await getattr(mesh.graph, rpc)(getattr(g, f"{rpc}Request")(user_id=alice), **mesh.as_(alice))
    assert (refused.value.code(), fields_of(refused.value)) == (INVALID, ["user_id"])
    assert reason_of(refused.value) == ("SELF_BLOCK" if "lock" in rpc else "SELF_MUTE")


async def test_nobody_follows_past_a_block(mesh: Mesh) -> None:
    alice, bob = await mesh.create_user("alice"), await mesh.create_user("bob")
    await mesh.graph.Block(g.BlockRequest(user_id=bob), **mesh.as_(alice))
    for follower, followee in ((alice, bob), (bob, alice)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.follow(follower, followee)
        assert (refused.value.code(), reason_of(refused.value)) == (grpc.StatusCode.PERMISSION_DENIED, "BLOCKED")


async def test_texts_of_exactly_the_maximum_are_stored_as_nfc(mesh: Mesh) -> None:
    alice = await mesh.create_user("alice")
    family = "👨‍👩‍👧‍👦" * 140
    assert len(family.encode()) == 3_500
    assert (await mesh.post(alice, family)).text == family
    assert (await mesh.post(alice, "e\u0301")).text == "é"
    for tweet in (await mesh.home(alice)).items:
        assert tweet.tweet.text in {family, "é"}
