"""What graph_svc decides, without I/O."""

import re
import unicodedata

from graph_svc.store import User
from mesh.errors import InvalidArgumentError
from starling.graph.v1 import graph_pb2

DISPLAY_NAME_MAX = 50
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
