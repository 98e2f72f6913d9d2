"""The REST API, over a mesh of real processes."""

import asyncio
import concurrent.futures
import gzip
import json
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jwt
import pytest
import requests

from backends.servers import Cluster
from launcher.plan import EDGE_BINARY
from mesh import principals
from mesh.principals import OPERATOR
from tests.e2e.conftest import START_SECONDS, STOP_SECONDS, RunningMesh
from tests.e2e.rest import API, Rest, as_, new_user, problem
from tests.waiting import until

UNSAFE_ID = 9_007_199_254_740_993
"""2^53 + 1: no double has it."""
ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("edge")
    (folder / "web").mkdir()
    (folder / "web/index.html").write_text("<title>the page</title>" + " " * 5_000)
    (folder / "web/ops.html").write_text("<title>ops</title>")
    (folder / "secret.txt").write_text("not for the web")
    running = RunningMesh(folder / "data")
    running.start(
        STARLING_EDGE_WEB=str(folder / "web"),
        STARLING_EDGE_CORS_ORIGINS=ORIGIN,
        STARLING_EDGE_USER_BURST="5000",
        STARLING_EDGE_ADDRESS_BURST="50000",
    )
    try:
        yield running
        assert running.stop() == 0, running.log()
    finally:
        running.destroy()


@pytest.fixture
def person(mesh: RunningMesh) -> tuple[Rest, str]:
    return new_user(mesh.folder, f"u{uuid.uuid4().hex[:12]}")


def test_a_post_is_read_at_home_by_who_follows(mesh: RunningMesh, person: tuple[Rest, str]) -> None:
    author, author_id = person
    reader, reader_id = new_user(mesh.folder, f"r{uuid.uuid4().hex[:12]}")
    assert reader.ok("POST", "/follows", {"targetId": author_id}) == {"changed": True}
    assert reader.ok("POST", "/follows", {"targetId": int(author_id)}) == {"changed": False}
    posted = author.call("POST", "/tweets", {"text": "hello"})
    assert posted.status_code == 201
    tweet = posted.json()
    assert posted.headers["Location"] == f"{API}/tweets/{tweet['tweetId']}"
    token = posted.headers["Starling-Read-Your-Write"]
    own = author.ok("GET", "/timeline/home", params={"readYourWriteToken": token, "limit": 1})
    assert [item["itemId"] for item in own["items"]] == [tweet["tweetId"]]
    assert own["nextCursor"] == ""
    retweet = reader.call("POST", f"/tweets/{tweet['tweetId']}/retweets")
    assert (retweet.status_code, retweet.json()["retweetedTweetId"]) == (201, tweet["tweetId"])
    assert reader.ok("POST", f"/tweets/{tweet['tweetId']}/likes") == {"changed": True}
    done = reader.ok("GET", "/engagements", params={"tweetIds": tweet["tweetId"]})
    assert done == {"likedTweetIds": [tweet["tweetId"]], "retweetedTweetIds": [tweet["tweetId"]]}
    assert reader.ok("DELETE", f"/tweets/{tweet['tweetId']}/retweets") == {"changed": True}
    assert reader.ok("DELETE", f"/tweets/{tweet['tweetId']}/likes") == {"changed": True}
    assert reader.ok("GET", f"/users/{author_id}/followers")["userIds"] == [reader_id]
    assert reader.ok("DELETE", f"/follows/{author_id}") == {"changed": True}
    for what in ("mutes", "blocks"):
        assert reader.ok("POST", f"/{what}", {"targetId": author_id}) == {"changed": True}
        assert reader.ok("GET", f"/{what}")["userIds"] == [author_id]
        assert reader.ok("DELETE", f"/{what}/{author_id}") == {"changed": True}
    deleted = author.call("DELETE", f"/tweets/{tweet['tweetId']}")
    assert (deleted.status_code, deleted.content) == (204, b"")
    problem(reader.call("GET", f"/tweets/{tweet['tweetId']}"), 404, "TWEET_NOT_FOUND")


def test_a_walk_by_cursors_is_the_whole_timeline(person: tuple[Rest, str]) -> None:
    author, author_id = person
    posted = [author.ok("POST", "/tweets", {"text": f"number {n}"})["tweetId"] for n in range(7)]
    for path, name in (("/timeline/home", "items"), (f"/users/{author_id}/tweets", "tweets")):
        found = [item.get("itemId") or item["tweetId"] for item in author.walk(path, name, limit=2)]
        assert found == posted[::-1]
    problem(author.call("GET", "/timeline/home", params={"cursor": "x"}), 400, names="cursor")
    problem(author.call("GET", "/timeline/home", params={"limit": -1}), 400, names="limit")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (rb'{"text": "a\u0000"}', "text"),
        (rb'{"text": "a\ud83d"}', "text"),
        (b'{"text": "\xff\xfe"}', "text"),
        (b'{"mediaIds": ["a", "\xff"]}', "mediaIds[1]"),
        (b'{"text": "hi", "nope": 1}', "nope"),
        (b'{"text": "hi", "text": "ho"}', "text"),
        (b'{"text": 5}', "text"),
        (b'{"text": ["hi"]}', "text"),
        (b'{"text": ""}', "text"),
        (b'{"text": "hi", "inReplyToTweetId": "x"}', "inReplyToTweetId"),
        (b'{"text": "hi", "inReplyToTweetId": 18446744073709551616}', "inReplyToTweetId"),
        (b'{"text": "hi", "mediaIds": ["a", "a"]}', "mediaIds"),
        (b'{"text": "hi", "requestId": "x"}', "requestId"),
        (b'{"text": "hi"} {"text": "ho"}', ""),
        (b"[]", ""),
        (b"", ""),
    ],
)
def test_t3_bad_bodies_are_400_and_name_their_field(person: tuple[Rest, str], body: bytes, field: str) -> None:
    author, author_id = person
    problem(author.call("POST", "/tweets", body), 400, names=field)
    assert author.ok("GET", f"/users/{author_id}/tweets")["tweets"] == []


def test_w1_ids_are_exact_strings_and_taken_in_both_forms(person: tuple[Rest, str]) -> None:
    author, author_id = person
    for form in (str(UNSAFE_ID), UNSAFE_ID):
        answer = author.call("POST", "/tweets", {"text": "hi", "quotedTweetId": form})
        problem(answer, 404, "TWEET_NOT_FOUND")
    first = author.ok("POST", "/tweets", {"text": "first"})["tweetId"]
    for form in (first, int(first)):
        assert author.ok("POST", "/tweets", {"text": "reply", "inReplyToTweetId": form})["inReplyToTweetId"] == first
    assert isinstance(first, str)
    assert int(first) > 1 << 53
    problem(author.call("GET", f"/tweets/{UNSAFE_ID}"), 404)
    problem(author.call("GET", f"/tweets/0{first}"), 400, names="tweetId")
    assert author.ok("GET", "/me")["userId"] == author_id
    problem(author.call("GET", "/tweets", params={"tweetIds": [first, "x"]}), 400, names="tweetIds")
    problem(author.call("GET", "/tweets", params={"nope": "1"}), 400, "UNKNOWN_PARAMETER", names="nope")
    assert len(author.ok("GET", "/tweets", params={"tweetIds": [first, UNSAFE_ID]})["tweets"]) == 1


def test_edits_take_field_masks_and_may_be_bound_to_a_version(person: tuple[Rest, str]) -> None:
    author, _ = person
    tweet_id = author.ok("POST", "/tweets", {"text": "one"})["tweetId"]
    path = f"/tweets/{tweet_id}"
    tag = author.call("GET", path).headers["ETag"]
    assert author.ok("PATCH", path, {"text": "two"}, headers={"If-Match": tag})["text"] == "two"
    assert author.ok("PATCH", f"{path}?updateMask=text", {"text": "three"})["version"] == 3
    problem(author.call("PATCH", path, {"text": "four"}, headers={"If-Match": tag}), 412, "VERSION_MISMATCH")
    problem(author.call("PATCH", path, {"text": "four"}, headers={"If-Match": '"x"'}), 412)
    problem(author.call("PATCH", f"{path}?updateMask=version", {"version": 9}), 400, names="updateMask")
    problem(author.call("PATCH", path, {"authorId": "5", "text": "four"}), 400, names="updateMask")
    problem(author.call("PATCH", path, {"nope": "5"}), 400, names="nope")
    problem(author.call("PATCH", path, {"text": "x" * 281}), 400, names="text")
    problem(author.call("DELETE", path, headers={"If-Match": tag}), 400, names="If-Match")
    texts = [revision["text"] for revision in author.walk(f"{path}/revisions", "revisions", limit=1)]
    assert texts == ["three", "two", "one"]


def test_a_policy_keeps_what_a_patch_does_not_name(mesh: RunningMesh) -> None:
    operator = as_(mesh.folder, OPERATOR)
    operator.ok("PATCH", "/fanout/policy", {"pullThreshold": 5_000, "pullThresholdMin": "400"})
    patched = operator.ok("PATCH", "/fanout/policy", {"pullThreshold": "6000"})
    assert patched["policy"] == {"pullThreshold": "6000", "pullThresholdMin": "400"}
    assert operator.ok("GET", "/fanout/policy")["policy"] == patched["policy"]
    problem(operator.call("PATCH", "/fanout/policy", {"pullThreshold": 1}), 400, names="pullThreshold")
    assert operator.ok("GET", "/fanout/status")["worker"]["name"]


def test_a_key_posts_once_and_means_one_body(person: tuple[Rest, str]) -> None:
    author, author_id = person
    for key in (f'"{uuid.uuid4()}"', "order-7"):
        headers = {"Idempotency-Key": key}
        first = author.ok("POST", "/tweets", {"text": f"once {key}"}, headers=headers)
        again = author.call("POST", "/tweets", {"text": f"once {key}"}, headers=headers)
        assert (again.status_code, again.json()["tweetId"]) == (201, first["tweetId"])
        other = author.call("POST", "/tweets", {"text": "another"}, headers=headers)
        problem(other, 422, "REQUEST_ID_REUSED", names="Idempotency-Key")
    assert len(author.ok("GET", f"/users/{author_id}/tweets")["tweets"]) == 2


async def test_a_key_whose_first_request_runs_is_409(mesh: RunningMesh, person: tuple[Rest, str]) -> None:
    author, _ = person
    headers = {"Idempotency-Key": str(uuid.uuid4())}
    old = mesh.kill("tweet_svc")  # The edge waits for it to come back.
    with concurrent.futures.ThreadPoolExecutor() as threads:
        running = [threads.submit(author.call, "POST", "/tweets", {"text": "slow"}, headers=headers) for _ in range(2)]
        answers = [one.result() for one in running]
    assert sorted(answer.status_code for answer in answers) in ([201, 409], [409, 503])
    problem(min(answers, key=lambda one: one.status_code != 409), 409, "IDEMPOTENCY_KEY_IN_USE")
    await mesh.comes_back("tweet_svc", old)


def test_nobody_acts_for_another(mesh: RunningMesh, person: tuple[Rest, str]) -> None:
    author, author_id = person
    other, _ = new_user(mesh.folder, f"o{uuid.uuid4().hex[:12]}")
    tweet_id = author.ok("POST", "/tweets", {"text": "mine"})["tweetId"]
    problem(other.call("PATCH", f"/tweets/{tweet_id}", {"text": "yours"}), 403, "NOT_THE_AUTHOR")
    problem(other.call("DELETE", f"/tweets/{tweet_id}"), 403, "NOT_THE_AUTHOR")
    # There is no way to name another: whose home it is, and who follows, is the token's to say.
    problem(other.call("GET", "/timeline/home", params={"viewerId": author_id}), 400, names="viewerId")
    problem(other.call("POST", "/follows", {"targetId": "1", "followerId": author_id}), 400, names="followerId")
    problem(other.call("GET", "/fanout/policy"), 403, "KIND_NOT_ALLOWED")
    problem(other.call("POST", "/users", {"handle": "mallory"}), 403, "KIND_NOT_ALLOWED")
    operator = as_(mesh.folder, OPERATOR)
    problem(operator.call("GET", "/timeline/home"), 403, "KIND_NOT_ALLOWED")
    problem(operator.call("GET", "/me"), 403, "USERS_ONLY")
    page = author.ok("GET", "/timeline/home", params={"limit": 1})
    author.ok("POST", "/tweets", {"text": "newer"})
    page = author.ok("GET", "/timeline/home", params={"limit": 1})
    problem(other.call("GET", "/timeline/home", params={"cursor": page["nextCursor"]}), 400, names="cursor")


def test_bad_tokens_are_401(mesh: RunningMesh, person: tuple[Rest, str]) -> None:
    author, author_id = person
    secret = mesh.folder.read_secrets().auth_secret
    now = int(time.time())
    good = {"sub": f"user:{author_id}", "iss": "starling", "aud": "starling", "iat": now, "exp": now + 60}

    def refused(token: str, reason: str) -> None:
        answer = Rest(author.base, token).call("GET", "/me")
        problem(answer, 401, reason)
        assert answer.headers["WWW-Authenticate"] == "Bearer"

    refused("", "UNAUTHENTICATED")
    for changes in ({"aud": "x"}, {"iss": "x"}, {"nbf": now + 60}, {"sub": "service:tweet_svc"}, {"sub": "user:x"}):
        refused(jwt.encode(good | changes, secret), "TOKEN_INVALID")
    refused(jwt.encode(good | {"exp": now - 60}, secret), "TOKEN_EXPIRED")
    refused(jwt.encode(good, secret + "x"), "TOKEN_INVALID")
    refused(jwt.encode(good, "", algorithm="none"), "TOKEN_INVALID")
    refused("x" * 5_000, "TOKEN_INVALID")
    assert Rest(author.base, jwt.encode(good, secret)).ok("GET", "/me")["userId"] == author_id


def test_paths_methods_and_media_types_that_are_not_there(person: tuple[Rest, str]) -> None:
    author, _ = person
    problem(author.call("GET", "/nope"), 404, "NO_SUCH_PATH")
    problem(author.call("GET", "/tweets//likes"), 404, "NO_SUCH_PATH")
    answer = author.call("PUT", "/tweets")
    problem(answer, 405, "METHOD_NOT_ALLOWED")
    assert set(answer.headers["Allow"].split(", ")) == {"GET", "HEAD", "POST", "OPTIONS"}
    options = author.call("OPTIONS", "/tweets")
    assert (options.status_code, options.headers["Allow"]) == (204, answer.headers["Allow"])
    for kind in ("text/plain", "application/json; charset=utf-16", ""):
        problem(author.call("POST", "/tweets", b'{"text": "x"}', headers={"Content-Type": kind}), 415)
    problem(author.call("POST", "/tweets", {"text": "x" * 70_000}), 413, "BODY_TOO_LARGE")
    problem(author.call("POST", "/tweets/5/likes", {"nope": 1}), 400, "UNEXPECTED_BODY")
    problem(author.call("GET", "/me", headers={"Grpc-Timeout": "soon"}), 400)
    assert author.call("GET", "/me", headers={"X": "x" * 70_000}).status_code == 431


def test_reads_are_tagged_compressed_and_answer_to_head_and_slashes(person: tuple[Rest, str]) -> None:
    author, author_id = person
    for n in range(20):
        author.ok("POST", "/tweets", {"text": f"number {n} of some"})
    path = f"/users/{author_id}/tweets"
    read = author.call("GET", path, headers={"Accept-Encoding": "gzip"})
    assert read.headers["Content-Encoding"] == "gzip"
    assert len(read.json()["tweets"]) == 20
    tag = read.headers["ETag"]
    plain = author.call("GET", path, headers={"Accept-Encoding": "identity"})
    assert "Content-Encoding" not in plain.headers
    assert (plain.headers["ETag"], plain.json()) == (tag, read.json())
    unchanged = author.call("GET", path, headers={"If-None-Match": f'"x", {tag}'})
    assert (unchanged.status_code, unchanged.content, unchanged.headers["ETag"]) == (304, b"", tag)
    head = author.call("HEAD", path, headers={"Accept-Encoding": "identity"})
    assert (head.status_code, head.content, head.headers["Content-Length"]) == (200, b"", str(len(plain.content)))
    assert author.ok("GET", f"{path}/") == plain.json()
    author.ok("POST", "/tweets/", {"text": "more"})
    assert author.call("GET", path, headers={"If-None-Match": tag}).status_code == 200


def test_other_origins_are_those_of_the_list(person: tuple[Rest, str]) -> None:
    author, _ = person
    wanted = {"Access-Control-Request-Method": "PATCH", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = requests.options(author.base + API + "/tweets/5", headers={"Origin": ORIGIN, **wanted}, timeout=10)
    assert preflight.status_code == 204
    assert preflight.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert preflight.headers["Access-Control-Allow-Methods"] == "PATCH"
    read = author.call("GET", "/me", headers={"Origin": ORIGIN})
    assert read.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "Starling-Read-Your-Write" in read.headers["Access-Control-Expose-Headers"]
    for headers in ({"Origin": "https://evil.example", **wanted}, {"Origin": "null", **wanted}):
        refused = requests.options(author.base + API + "/tweets/5", headers=headers, timeout=10)
        assert "Access-Control-Allow-Origin" not in refused.headers


def test_the_page_is_served_and_nothing_beside_it(mesh: RunningMesh) -> None:
    base = mesh.mesh.edge
    page = requests.get(base, timeout=10, headers={"Accept-Encoding": "gzip"})
    assert "the page" in page.text
    assert page.headers["Content-Encoding"] == "gzip"
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    assert "ops" in requests.get(f"{base}/ops", timeout=10).text
    for path in ("/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "/nope", "/index.html/x"):
        session = requests.Session()
        prepared = requests.Request("GET", base).prepare()
        prepared.url = base + path
        problem(session.send(prepared, timeout=10), 404)
    for path in ("/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/viewer.js", "/openapi.json"):
        answer = requests.get(base + path, timeout=10)
        assert answer.status_code == 200, path
        if path.startswith("/docs"):
            assert "://" not in answer.text.partition("</head>")[0] or path != "/docs"
    assert requests.get(f"{base}/healthz", timeout=10).text == "ok\n"


def test_what_clients_say_of_forwarding_goes_nowhere(person: tuple[Rest, str]) -> None:
    author, _ = person
    said = {"X-Forwarded-For": "é", "X-Forwarded-Host": "é", "Grpc-Metadata-Authorization": "Bearer x"}
    headers = {name: value.encode("latin-1") for name, value in said.items()}
    assert author.call("GET", "/me", headers=headers).status_code == 200


def test_a_trace_is_gone_on_with(person: tuple[Rest, str]) -> None:
    author, _ = person
    trace = uuid.uuid4().hex
    answer = author.call("GET", "/me", headers={"Traceparent": f"00-{trace}-{trace[:16]}-01"})
    assert answer.headers["Traceparent"].startswith(f"00-{trace}-")
    assert answer.headers["Traceparent"].endswith("-00"), "what is recorded isn't the client's to say"
    assert trace[:16] not in answer.headers["Traceparent"].removeprefix(f"00-{trace}")


async def test_x4_a_deadline_goes_with_the_call(mesh: RunningMesh, person: tuple[Rest, str]) -> None:
    author, _ = person
    problem(author.call("GET", "/timeline/home", headers={"Grpc-Timeout": "1n"}), 504, "DEADLINE_EXCEEDED")
    assert author.call("GET", "/timeline/home", headers={"Grpc-Timeout": "5S"}).status_code == 200


async def test_a_service_that_is_away_is_503_and_the_edge_goes_on(mesh: RunningMesh, person: tuple[Rest, str]) -> None:
    author, _ = person
    old = mesh.kill("valkey")
    assert author.call("GET", "/me").status_code == 200
    await mesh.comes_back("valkey", old)

    await asyncio.to_thread(keeps_limits, author)


def keeps_limits(client: Rest) -> None:
    """Wait until its edge has found Valkey."""
    until(lambda: "RateLimit-Limit" in client.call("GET", "/me").headers)


def test_small_bodies_cost_what_they_are(person: tuple[Rest, str]) -> None:
    """What is compressed is what says so: a plain client gets plain text."""
    author, _ = person
    raw = author.call("GET", "/me", headers={"Accept-Encoding": "gzip"}, stream=True).raw.read()
    assert json.loads(raw if raw[:1] == b"{" else gzip.decompress(raw))["userId"]


def limited_mesh(folder: Path) -> RunningMesh:
    running = RunningMesh(folder / "data")
    running.start(
        STARLING_EDGE_USER_PER_SECOND="0.01",
        STARLING_EDGE_USER_BURST="5",
        STARLING_EDGE_ADDRESS_PER_SECOND="0.01",
        STARLING_EDGE_ADDRESS_BURST="12",
    )
    return running


def test_limits_are_each_users_and_each_addresss(tmp_path: Path) -> None:
    mesh = limited_mesh(tmp_path)
    try:
        one = as_(mesh.folder, principals.user(5))
        answers = [one.call("GET", "/tweets/1") for _ in range(6)]
        assert [answer.status_code for answer in answers] == [404] * 5 + [429]
        assert [answer.headers["RateLimit-Remaining"] for answer in answers] == ["4", "3", "2", "1", "0", "0"]
        assert {answer.headers["RateLimit-Limit"] for answer in answers} == {"5"}
        assert 490 <= int(answers[-1].headers["RateLimit-Reset"]) <= 500
        problem(answers[-1], 429, "RATE_LIMITED")
        other = as_(mesh.folder, principals.user(6))
        assert other.call("GET", "/tweets/1").status_code == 404
        nobody = Rest(one.base, "x")
        statuses = [nobody.call("GET", "/tweets/1").status_code for _ in range(9)]
        assert statuses[0] == 401
        assert statuses[-1] == 429
        assert mesh.stop() == 0
    finally:
        mesh.destroy()


@contextmanager
def another_edge(mesh: RunningMesh, folder: Path, **environment: str) -> Iterator[str]:
    """One more edge of a mesh, beside the launcher's: its URL."""
    address, running = folder / f"address-{uuid.uuid4()}", mesh.mesh
    edge = subprocess.Popen(
        [EDGE_BINARY],
        env={
            "STARLING_ADDRESS_FILE": str(address),
            "STARLING_AUTH_SECRET": mesh.folder.read_secrets().auth_secret,
            "STARLING_GRAPH_TARGET": running.graph,
            "STARLING_TWEET_TARGET": running.tweet,
            "STARLING_TIMELINE_TARGET": running.timeline,
            "STARLING_FANOUT_TARGETS": ",".join(running.fanout.values()),
            **environment,
        },
    )
    try:
        end = time.monotonic() + START_SECONDS
        while not address.exists() or not address.read_text():
            with suppress(subprocess.TimeoutExpired):
                edge.wait(0.05)
            assert edge.returncode is None
            assert time.monotonic() < end
        yield f"http://{address.read_text()}"
        edge.terminate()
        assert edge.wait(STOP_SECONDS) == 0
    finally:
        edge.kill()


async def test_too_many_calls_at_once_are_refused_at_once(
    mesh: RunningMesh, person: tuple[Rest, str], tmp_path: Path
) -> None:
    options = {"STARLING_EDGE_CALLS_MAX": "1", "STARLING_VALKEY_URL": mesh.mesh.valkey_url}
    with another_edge(mesh, tmp_path, **options) as base, concurrent.futures.ThreadPoolExecutor() as threads:
        client = Rest(base, person[0].token)
        mesh.kill("tweet_svc", signal.SIGSTOP)
        try:
            deadline = {"Grpc-Timeout": "3S"}
            calls = [
                threads.submit(Rest(base, client.token).call, "GET", "/tweets/1", headers=deadline) for _ in range(3)
            ]
            answers = sorted((call.result() for call in calls), key=lambda answer: answer.status_code)
            for refused in answers[:2]:
                problem(refused, 503, "OVERLOADED")
            problem(answers[2], 504, "DEADLINE_EXCEEDED")
        finally:
            mesh.kill("tweet_svc", signal.SIGCONT)
        assert client.call("GET", "/me").status_code == 200


def test_edges_keep_one_limit_in_a_cluster_of_valkey(
    mesh: RunningMesh, valkey_cluster: Cluster, tmp_path: Path
) -> None:
    options = {
        **valkey_cluster.environment,
        "STARLING_EDGE_USER_PER_SECOND": "0.01",
        "STARLING_EDGE_USER_BURST": "6",
    }
    with another_edge(mesh, tmp_path, **options) as one, another_edge(mesh, tmp_path, **options) as other:
        ready = as_(mesh.folder, principals.user(4)).token
        for base in (one, other):
            keeps_limits(Rest(base, ready))
        for user_id in (5, 6, 7):  # Their buckets are on different nodes, as it comes.
            token = as_(mesh.folder, principals.user(user_id)).token
            answers = [Rest(base, token).call("GET", "/tweets/1") for base in (one, other) * 4]
            assert [answer.status_code for answer in answers] == [404] * 6 + [429] * 2
