"""The `starling` command against a mesh that a launcher runs."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.__main__ import run
from mesh.principals import Verifier
from tests.e2e.conftest import ROOT, RunningMesh


@dataclass(frozen=True)
class Answer:
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)


Starling = Callable[..., Answer]
USUAL_POLICY = {"pullThreshold": "100000", "pullThresholdMin": "0"}
NO_PRESSURE = {"bigTasksSlow": False, "pullThreshold": "100000", "changes": "0"}


@pytest.fixture
def starling(
    running_mesh: RunningMesh, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Starling:
    """Runs a command, in this process."""
    monkeypatch.delenv("STARLING_TOKEN", raising=False)

    def command(*arguments: str) -> Answer:
        status = run(["--data", str(running_mesh.folder.path), *arguments])
        captured = capsys.readouterr()
        return Answer(status, captured.out, captured.err)

    return command


def made(starling: Starling, *handles: str) -> None:
    for handle in handles:
        assert starling("user", "create", handle).status == 0


def test_a_post_is_read_by_a_follower_and_by_its_author_at_once(starling: Starling) -> None:
    made(starling, "alice", "bob")
    assert starling("follow", "bob", "@alice").out == "@bob follows @alice\n"
    assert starling("follow", "bob", "alice", "--json").json == {"changed": False}
    posted = starling("post", "alice", "Good morning", "--json").json
    tweet_id = posted["tweet"]["tweetId"]
    assert posted["readYourWriteToken"] == tweet_id
    for reader in ("alice", "bob"):
        (item,) = starling("home", reader, "--json").json["items"]
        assert (item["tweet"]["tweetId"], item["author"]["handle"]) == (tweet_id, "alice")
    assert f"{tweet_id}  @alice  Good morning\n" in starling("home", "bob").out
    assert starling("unfollow", "bob", "alice", "--json").json == {"changed": True}
    assert starling("home", "bob", "--json").json == {"items": [], "nextPageToken": ""}


def test_a_home_is_paged_and_walked(starling: Starling) -> None:
    made(starling, "pager")
    ids = [starling("post", "pager", f"tweet {n}", "--json").json["tweet"]["tweetId"] for n in range(5)]
    first = starling("home", "pager", "--limit", "2")
    *_, last_line = first.out.splitlines()
    assert last_line.startswith("next: --page-token ")
    assert len(first.out.splitlines()) == 3
    rest = starling("home", "pager", "--limit", "2", "--page-token", last_line.split()[-1], "--all", "--json").json
    assert [item["tweet"]["tweetId"] for item in rest["items"]] == ids[2::-1]
    assert rest["nextPageToken"] == ""
    profile = starling("profile", "pager", "--all", "--limit", "3", "--json").json
    assert [tweet["tweetId"] for tweet in profile["tweets"]] == ids[::-1]


def test_a_home_shows_what_may_have_come_since_a_tweet(starling: Starling) -> None:
    made(starling, "absent")
    ids = [starling("post", "absent", f"tweet {n}", "--json").json["tweet"]["tweetId"] for n in range(4)]
    late = starling("home", "absent", "--newer-than", ids[1], "--json").json
    assert [item["tweet"]["tweetId"] for item in late["items"]] == [ids[3], ids[2], ids[0]], "a minute, without itself"
    minutes_later = str(int(ids[3]) + (90_000 << 22))
    assert starling("home", "absent", "--newer-than", minutes_later, "--json").json["items"] == []
    first = starling("home", "absent", "--newer-than", ids[0], "--limit", "1", "--json").json
    options = ("--newer-than", ids[0], "--page-token", first["nextPageToken"], "--all", "--json")
    rest = starling("home", "absent", *options).json
    assert [item["tweet"]["tweetId"] for item in (*first["items"], *rest["items"])] == [ids[3], ids[2], ids[1]]
    other = starling("home", "absent", "--newer-than", ids[1], "--page-token", first["nextPageToken"])
    assert other.status == 1, "a token is of one catch-up"


async def test_catch_up_brings_each_tweet_once_that_the_caller_lacks(running_mesh: RunningMesh) -> None:
    async with running_mesh.client() as client:
        author = (await client.create_user("catcher")).user_id
        posted = [(await client.post(author, f"tweet {n}")).tweet.tweet_id for n in range(7)][::-1]

        async def caught_up(known: list[int]) -> list[int]:
            return [item.tweet.tweet_id for item in await client.catch_up(author, known, page_size=2)]

        assert await caught_up([]) == posted, "who has nothing gets all"
        assert await caught_up(posted) == []
        assert await caught_up(posted[3:]) == posted[:3]
        # What was committed late lies below the newest that is known, and comes nevertheless.
        late = posted[4]
        assert await caught_up([tweet_id for tweet_id in posted[2:] if tweet_id != late]) == [*posted[:2], late]
        assert await caught_up([posted[0] + (90_000 << 22)]) == [], "no deeper than a minute"


def test_a_home_is_watched(starling: Starling, running_mesh: RunningMesh) -> None:
    made(starling, "watched", "watcher")
    assert starling("follow", "watcher", "watched").status == 0
    command = ["-m", "cli", "--data", str(running_mesh.folder.path), "home", "watcher", "--watch", "--json"]
    posted = [starling("post", "watched", "before", "--json").json["tweet"]["tweetId"]]
    watching = subprocess.Popen(
        [sys.executable, *command, "--newer-than", str(int(posted[0]) - 1)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert watching.stdout
        assert json.loads(watching.stdout.readline())["itemId"] == posted[0]
        for number in range(3):
            posted.append(starling("post", "watched", f"tweet {number}", "--json").json["tweet"]["tweetId"])
            item = json.loads(watching.stdout.readline())
            assert (item["itemId"], item["tweet"]["text"]) == (posted[-1], f"tweet {number}")
    finally:
        watching.kill()
        watching.wait(10)


def test_replies_quotes_and_request_ids_go_with_a_post(starling: Starling) -> None:
    made(starling, "replier")
    root = starling("post", "replier", "root", "--json").json["tweet"]["tweetId"]
    request = ("--request-id", "4f4b4a0e-6a9e-4c62-9d5c-0d7c1d3c2b1a")
    options = ("--reply-to", root, "--quote", root, "--media", "m1", "--media", "m2", *request, "--json")
    reply = starling("post", "replier", "answer", *options).json["tweet"]
    assert (reply["inReplyToTweetId"], reply["quotedTweetId"], reply["mediaIds"]) == (root, root, ["m1", "m2"])
    assert starling("post", "replier", "answer", *options).json["tweet"] == reply
    again = starling("post", "replier", "another answer", *request)
    assert again.status == 1
    assert "REQUEST_ID_REUSED" in again.err


def test_a_deleted_tweet_is_gone(starling: Starling) -> None:
    made(starling, "deleter", "other")
    tweet_id = starling("post", "deleter", "regretted", "--json").json["tweet"]["tweetId"]
    refused = starling("delete", "other", tweet_id)
    assert (refused.status, refused.out) == (1, "")
    assert "(PERMISSION_DENIED NOT_THE_AUTHOR)" in refused.err
    assert starling("delete", "deleter", tweet_id, "--json").json == {"tweetId": tweet_id}
    assert starling("home", "deleter", "--json").json["items"] == []
    assert starling("profile", "deleter", "--json").json["tweets"] == []


def test_a_retweet_is_shown_in_the_profile_until_it_is_taken_back(starling: Starling) -> None:
    made(starling, "original", "retweeter")
    tweet_id = starling("post", "original", "worth it\nreally", "--json").json["tweet"]["tweetId"]
    retweeted = starling("retweet", "retweeter", tweet_id, "--json").json["tweet"]
    assert (retweeted["retweetedTweetId"], retweeted["text"]) == (tweet_id, "")
    retweet_id = retweeted["tweetId"]
    assert starling("retweet", "retweeter", retweet_id).out == f"Retweeted {tweet_id} as {retweet_id}\n"
    profile = starling("profile", "retweeter").out
    assert f"{retweet_id}  @retweeter retweeted @original  worth it\n  " in profile
    starling("delete", "original", tweet_id)
    assert starling("profile", "retweeter").out.endswith("@retweeter retweeted @original  tweet unavailable\n")
    assert starling("unretweet", "retweeter", tweet_id).out == f"@retweeter no longer retweets {tweet_id}\n"
    assert starling("unretweet", "retweeter", retweet_id).out == f"@retweeter didn't retweet {retweet_id}\n"
    assert starling("unretweet", "retweeter", retweet_id, "--json").json == {"changed": False}
    assert starling("profile", "retweeter", "--json").json["tweets"] == []


def test_a_tweet_is_edited_and_its_texts_are_kept(starling: Starling) -> None:
    made(starling, "editor", "stranger")
    tweet_id = starling("post", "editor", "frist", "--json").json["tweet"]["tweetId"]
    assert starling("edit", "editor", tweet_id, "first").out == f"Edited {tweet_id}, now version 2\n"
    assert starling("edit", "editor", tweet_id, "first", "--json").json["version"] == 2
    assert f"{tweet_id}  @editor  first\n" in starling("home", "editor").out
    shown = starling("revisions", tweet_id, "--json").json["revisions"]
    assert [(revision["version"], revision["text"]) for revision in shown] == [(2, "first"), (1, "frist")]
    newest, next_page = starling("revisions", tweet_id, "--limit", "1").out.splitlines()
    assert newest.endswith("  2  first")
    rest = starling("revisions", tweet_id, "--page-token", next_page.split()[-1]).out
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  1  frist\n", rest)
    refused = starling("edit", "stranger", tweet_id, "mine")
    assert (refused.status, refused.out) == (1, "")
    assert "(PERMISSION_DENIED NOT_THE_AUTHOR)" in refused.err
    assert "field tweet.text" in starling("edit", "editor", tweet_id, " ").err


def test_a_tweet_is_liked_and_counted(starling: Starling) -> None:
    made(starling, "liked", "fan")
    tweet_id = starling("post", "liked", "likeable", "--json").json["tweet"]["tweetId"]
    assert starling("like", "fan", tweet_id).out == f"@fan likes {tweet_id}\n"
    assert starling("like", "fan", tweet_id).out == f"@fan already liked {tweet_id}\n"
    (tweet,) = starling("profile", "liked", "--json").json["tweets"]
    assert tweet["counts"] == {"likes": "1", "retweets": "0", "replies": "0", "quotes": "0"}
    assert starling("unlike", "fan", tweet_id, "--json").json == {"changed": True}
    assert starling("unlike", "fan", tweet_id).out == f"@fan didn't like {tweet_id}\n"


def test_accounts_are_shown_with_whom_they_follow(starling: Starling) -> None:
    assert starling("user", "create", "named", "--name", "A Name", "--json").json["displayName"] == "A Name"
    made(starling, "fan1", "fan2")
    for fan in ("fan1", "fan2"):
        starling("follow", fan, "named")
    shown = starling("user", "show", "@NAMED", "--json").json
    assert (shown["handle"], shown["followerCount"], shown["followingCount"]) == ("named", "2", "0")
    page = starling("followers", "named", "--limit", "1", "--json").json
    assert [user["handle"] for user in page["users"]] == ["fan1"]
    rest = starling("followers", "named", "--page-token", page["nextPageToken"]).out
    assert rest == "@fan2             fan2\n"
    assert [user["handle"] for user in starling("following", "fan1", "--json").json["users"]] == ["named"]


def test_accounts_are_blocked_and_muted(starling: Starling) -> None:
    made(starling, "blocker", "nuisance")
    starling("follow", "nuisance", "blocker")
    assert starling("block", "blocker", "@nuisance").out == "@blocker blocks @nuisance\n"
    assert starling("block", "blocker", "nuisance").out == "@blocker already blocked @nuisance\n"
    assert starling("followers", "blocker", "--json").json["users"] == []
    refused = starling("follow", "nuisance", "blocker")
    assert (refused.status, refused.out) == (1, "")
    assert refused.err == "Error: One of the two blocks the other (PERMISSION_DENIED BLOCKED)\n"
    assert starling("unblock", "blocker", "nuisance", "--json").json == {"changed": True}
    assert starling("unblock", "blocker", "nuisance").out == "@blocker didn't block @nuisance\n"
    assert starling("follow", "nuisance", "blocker", "--json").json == {"changed": True}
    assert starling("mute", "nuisance", "blocker", "--json").json == {"changed": True}
    assert starling("mute", "nuisance", "blocker").out == "@nuisance already muted @blocker\n"
    assert starling("unmute", "nuisance", "blocker").out == "@nuisance no longer mutes @blocker\n"
    assert starling("unmute", "nuisance", "blocker", "--json").json == {"changed": False}


def test_a_token_speaks_for_whom_it_names(
    starling: Starling, running_mesh: RunningMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(starling, "speaker", "bystander")
    user_id = starling("user", "show", "speaker", "--json").json["userId"]
    verifier = Verifier(running_mesh.folder.read_secrets().auth_secret)
    names = {"speaker": f"user:{user_id}", "operator": "operator", "service:timeline_svc": "service:timeline_svc"}
    for name, principal in names.items():
        answer = starling("token", name, "--json").json
        assert str(verifier.verify(f"Bearer {answer['token']}")) == answer["principal"] == principal
    monkeypatch.setenv("STARLING_TOKEN", starling("token", "speaker").out.strip())
    assert starling("post", "speaker", "by token").status == 0
    other = starling("post", "bystander", "by another's token")
    assert (other.status, other.out) == (1, "")
    assert f"STARLING_TOKEN speaks for user:{user_id}" in other.err


def test_a_mesh_elsewhere_is_reached_by_targets_and_a_token(
    starling: Starling, running_mesh: RunningMesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made(starling, "remote")
    starling("post", "remote", "from afar")
    targets = {"graph": running_mesh.mesh.graph, "timeline": running_mesh.mesh.timeline}
    options = [part for area, target in targets.items() for part in (f"--target-{area}", target)]
    without = starling("--data", str(tmp_path), *options, "home", "remote")
    assert (without.status, without.err) == (1, "Error: a mesh elsewhere wants a token: set STARLING_TOKEN\n")
    monkeypatch.setenv("STARLING_TOKEN", starling("token", "remote").out.strip())
    home = starling("--data", str(tmp_path), *options, "home", "remote", "--json").json
    assert [item["tweet"]["text"] for item in home["items"]] == ["from afar"]
    missing = starling("--data", str(tmp_path), *options, "post", "remote", "x")
    assert (missing.status, missing.err) == (1, "Error: no address of tweet_svc: give --target-tweet\n")


def test_a_graph_is_imported_once_however_often_it_is_tried(starling: Starling, tmp_path: Path) -> None:
    file = tmp_path / "graph.edges"
    file.write_text("# a comment\n% another\n\n1 2\n2 3\n3 3\n")
    first = starling("import-graph", str(file), "--undirected", "--batch", "2", "--json").json
    assert {k: v for k, v in first["users"].items() if k != "seconds"} == {"created": 3, "existing": 0}
    assert {k: v for k, v in first["follows"].items() if k != "seconds"} == {"created": 4, "existing": 0, "refused": 2}
    again = starling("import-graph", str(file), "--undirected").out
    assert "3 accounts: 0 new, 3 existing" in again
    assert "6 follows: 0 new, 4 existing, 2 refused" in again
    assert {user["handle"] for user in starling("following", "u2", "--json").json["users"]} == {"u1", "u3"}


def test_status_shows_health_lag_and_delays(starling: Starling) -> None:
    status = starling("status", "--json").json
    assert {service["name"]: service["status"] for service in status["services"]} == dict.fromkeys(
        ["graph_svc", "tweet_svc", "fanout_svc", "fanout_svc-slow", "timeline_svc", "valkey"], "SERVING"
    )
    fanout = status["fanout"]["fanout_svc"]
    assert {"lagMessages", "lagSeconds"} <= fanout["partitions"][0].keys()
    assert {"p50Seconds", "p95Seconds", "p99Seconds"} <= fanout["worker"]["delay"].keys()
    assert {k: v for k, v in status["policy"].items() if k != "pressure"} == USUAL_POLICY
    assert status["policy"]["pressure"].items() >= NO_PRESSURE.items()
    assert 0 <= status["policy"]["pressure"]["lagSeconds"] < 5
    text = starling("status").out
    assert "SERVING" in text
    assert "p95 s" in text
    assert "pull threshold: 100,000 followers\n" in text
    assert re.search(
        r"^pressure: none; \d\.\d s behind; 100,000 followers in force, changed 0 times$", text, re.MULTILINE
    )


def test_the_policy_is_shown_and_set(starling: Starling) -> None:
    def policy(*arguments: str) -> dict[str, Any]:
        answer: dict[str, Any] = starling("policy", *arguments, "--json").json
        pressure = answer.pop("pressure")
        assert (pressure["pullThreshold"], pressure["changes"]) == (answer["pullThreshold"], "0")
        return answer

    assert starling("policy").out.startswith("pull threshold: 100,000 followers\npressure: none; ")
    assert starling("policy", "--pull-threshold", "70000").out.startswith("pull threshold: 70,000 followers\n")
    assert policy() == {"pullThreshold": "70000", "pullThresholdMin": "0"}
    lines = starling("policy", "--pull-threshold-min", "20000").out.splitlines()
    assert lines[0] == "pull threshold: 70,000 followers, no lower than 20,000 under lag"
    assert policy("--pull-threshold", "60000") == {"pullThreshold": "60000", "pullThresholdMin": "20000"}
    assert starling("status", "--json").json["policy"]["pullThreshold"] == "60000"
    for option, value in (("pull-threshold", "1"), ("pull-threshold-min", "60001")):
        refused = starling("policy", f"--{option}", value)
        assert (refused.status, refused.out) == (1, "")
        assert f"(INVALID_ARGUMENT, field policy.{option.replace('-', '_')})" in refused.err
    assert policy("--pull-threshold", "100000", "--pull-threshold-min", "0") == USUAL_POLICY


def test_the_policy_is_the_operators(starling: Starling, monkeypatch: pytest.MonkeyPatch) -> None:
    made(starling, "curious")
    monkeypatch.setenv("STARLING_TOKEN", starling("token", "curious").out.strip())
    for arguments in ((), ("--pull-threshold", "5")):
        answer = starling("policy", *arguments)
        assert (answer.status, answer.out) == (1, "")
        assert "PERMISSION_DENIED" in answer.err


def test_a_list_is_rebuilt_on_demand(starling: Starling) -> None:
    made(starling, "rebuilt")
    starling("post", "rebuilt", "kept")
    assert starling("rebuild", "rebuilt", "--json").json == {"entries": 1}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("home", "nobody"), "Error: No such user, handle nobody (NOT_FOUND USER_NOT_FOUND)\n"),
        (("user", "create", "no spaces"), "Error: Must be 1 to 15 of A-Z a-z 0-9 _ (INVALID_ARGUMENT, field handle)\n"),
        (
            ("follow", "clumsy", "clumsy"),
            "Error: Nobody follows themselves (INVALID_ARGUMENT SELF_FOLLOW, field followee_id)\n",
        ),
        (
            ("block", "clumsy", "clumsy"),
            "Error: Nobody blocks themselves (INVALID_ARGUMENT SELF_BLOCK, field user_id)\n",
        ),
        (("user", "create", "clumsy"), "Error: The handle is taken, handle clumsy (ALREADY_EXISTS HANDLE_TAKEN)\n"),
    ],
)
def test_an_error_is_one_line(starling: Starling, arguments: tuple[str, ...], line: str) -> None:
    starling("user", "create", "clumsy")
    answer = starling(*arguments)
    assert (answer.status, answer.out, answer.err) == (1, "", line)


@pytest.mark.parametrize(
    "arguments",
    [
        ("delete", "alice", "x"),
        ("home", "alice", "--limit", "0"),
        ("policy", "--pull-threshold", "x"),
        ("nonsense",),
        ("import-graph", "/no/such"),
    ],
)
def test_wrong_usage_has_status_2(starling: Starling, arguments: tuple[str, ...]) -> None:
    answer = starling(*arguments)
    assert (answer.status, answer.out) == (2, "")
    assert "Error: " in answer.err


def test_without_a_mesh_it_says_how_to_start_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cli", "--data", str(tmp_path), "home", "alice"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    line = f"Error: no mesh runs on the data folder {tmp_path}: start it with 'make run'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)


def test_a_service_that_does_not_answer_is_one_line_too(
    starling: Starling, running_mesh: RunningMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARLING_TOKEN", starling("token", "operator").out.strip())
    answer = starling("--data", str(tmp_path), "--target-graph", "127.0.0.1:1", "user", "show", "alice")
    assert (answer.status, answer.out) == (1, "")
    assert answer.err.startswith(
        "Error: a service doesn't answer; does the mesh run? 'make run' starts it (UNAVAILABLE: "
    )
    assert answer.err.count("\n") == 1


def test_deleted_tweets_leave_the_lists_when_the_reconciler_has_been_there(
    starling: Starling, running_mesh: RunningMesh
) -> None:
    made(starling, "deletes", "reads_it")
    assert starling("follow", "reads_it", "deletes").status == 0
    (first, second) = (starling("post", "deletes", text, "--json").json["tweet"]["tweetId"] for text in ("one", "two"))
    for reader in ("deletes", "reads_it"):
        assert len(starling("home", reader, "--json").json["items"]) == 2  # So that both have lists.
    mesh, secrets = running_mesh.mesh, running_mesh.folder.read_secrets()
    environment = {
        "STARLING_VALKEY_URL": mesh.valkey_url,
        "STARLING_GRAPH_TARGET": mesh.graph,
        "STARLING_TWEET_TARGET": mesh.tweet,
        "STARLING_AUTH_SECRET": secrets.auth_secret,
        "STARLING_PAGE_TOKEN_KEYS": secrets.page_token_key,
    }

    def reconcile(**other: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "timeline_svc.reconcile"]
        how: dict[str, Any] = {"cwd": ROOT, "env": environment | other, "capture_output": True, "text": True}
        return subprocess.run(command, check=False, timeout=60, **how)

    reconcile()  # What others deleted.
    assert "removed: 0 ids" in reconcile().stdout
    assert starling("delete", "deletes", first).status == 0
    said = reconcile()
    assert re.fullmatch(r"[1-9]\d* lists; removed: [1-9]\d* ids of deleted tweets\n", said.stdout), said.stderr
    assert "removed: 0 ids" in reconcile().stdout
    assert [item["tweet"]["tweetId"] for item in starling("home", "reads_it", "--json").json["items"]] == [second]
    failed = reconcile(STARLING_VALKEY_URL="redis://127.0.0.1:1/0")
    assert (failed.returncode, failed.stderr.startswith("reconcile: Valkey doesn't answer")) == (1, True)
