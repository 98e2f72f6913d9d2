"""What graph_svc decides, without I/O."""

import re
import unicodedata

from graph_svc.pressure import Pressure
from graph_svc.store import DrainTask, FanoutPolicy, Mode, User
from mesh.errors import InvalidArgumentError
from starling.event.v1 import event_pb2
from starling.graph.v1 import graph_pb2

DISPLAY_NAME_MAX = 50
PULL_THRESHOLD_LEAST, PULL_THRESHOLD_MOST = 2, 1_000_000_000
_PUSH_BELOW_PERCENT = 80
_HANDLE = re.compile(r"[A-Za-z0-9_]{1,15}")


def handle(value: str) -> str:
    """A handle that may exist. Raises InvalidArgumentError."""
    if not _HANDLE.fullmatch(value):
        raise InvalidArgumentError("handle", "Must be 1 to 15 of A-Z a-z 0-9 _.")
    return value


def display_name(value: str, handle_: str) -> str:
    """NFC, without space around it; empty: the handle. Raises InvalidArgumentError."""
    if len(value) > 4 * DISPLAY_NAME_MAX:
        raise InvalidArgumentError("display_name", f"At most {DISPLAY_NAME_MAX} characters.")
    name = unicodedata.normalize("NFC", value).strip() or handle_
    if len(name) > DISPLAY_NAME_MAX:
        raise InvalidArgumentError("display_name", f"At most {DISPLAY_NAME_MAX} characters.")
    if any(unicodedata.category(char) in {"Cc", "Cn", "Cs"} for char in name):
        raise InvalidArgumentError("display_name", "Control characters and non-characters are not allowed.")
    return name


def to_message(user: User) -> graph_pb2.User:
    """A user as others see it."""
    message = graph_pb2.User(
        user_id=user.user_id,
        handle=user.handle,
        display_name=user.display_name,
        follower_count=user.follower_count,
        following_count=user.following_count,
    )
    message.created_at.FromMilliseconds(user.created_ms)
    return message


def push_below(pull_threshold: int) -> int:
    """Pulled authors with fewer followers than this are pushed again: well below the threshold, so that an author
    who oscillates about it doesn't change modes all the time."""
    return pull_threshold * _PUSH_BELOW_PERCENT // 100


def fanout_policy(request: graph_pb2.UpdateFanoutPolicyRequest, before: FanoutPolicy) -> FanoutPolicy:
    """The policy before with what the request changes. Raises InvalidArgumentError."""
    changed = set(request.update_mask.paths) or {"pull_threshold", "pull_threshold_min"}
    if not changed <= {"pull_threshold", "pull_threshold_min"}:
        raise InvalidArgumentError("update_mask", "Only `pull_threshold` and `pull_threshold_min` can be changed.")
    policy = policy_message(before)
    for name in changed:
        setattr(policy, name, getattr(request.policy, name))
    least, most = PULL_THRESHOLD_LEAST, PULL_THRESHOLD_MOST
    if not least <= policy.pull_threshold <= most:
        raise InvalidArgumentError("policy.pull_threshold", f"Must be {least} to {most:,}.")
    if policy.pull_threshold_min and not least <= policy.pull_threshold_min <= policy.pull_threshold:
        raise InvalidArgumentError("policy.pull_threshold_min", f"Must be 0, or {least} to the pull threshold.")
    return FanoutPolicy(policy.pull_threshold, policy.pull_threshold_min)


def policy_message(policy: FanoutPolicy) -> graph_pb2.FanoutPolicy:
    """A policy as the protos say it."""
    return graph_pb2.FanoutPolicy(pull_threshold=policy.pull_threshold, pull_threshold_min=policy.pull_threshold_min)


def policy_response(policy: FanoutPolicy, pressure: Pressure, pulled_authors: int) -> graph_pb2.GetFanoutPolicyResponse:
    """A policy, what lag makes of it, and how many authors are pulled, as the protos say it."""
    return graph_pb2.GetFanoutPolicyResponse(
        policy=policy_message(policy),
        pressure=graph_pb2.FanoutPressure(
            lag_seconds=pressure.lag_seconds,
            big_tasks_slow=pressure.slow,
            pull_threshold=pressure.threshold(policy),
            changes=pressure.changes,
        ),
        pulled_authors=pulled_authors,
    )


def mode_message(mode: Mode) -> graph_pb2.AuthorMode.ValueType:
    """A mode as the protos say it."""
    return {
        Mode.PUSH: graph_pb2.AUTHOR_MODE_PUSH,
        Mode.PULL: graph_pb2.AUTHOR_MODE_PULL,
        Mode.DRAIN: graph_pb2.AUTHOR_MODE_DRAIN,
    }[mode]


def drain_event(task: DrainTask) -> bytes:
    """A drain task as the log carries it."""
    event = event_pb2.TweetEvent(author_id=task.author_id)
    event.drain.epoch, event.drain.bucket = task.epoch, task.bucket
    return event.SerializeToString()
