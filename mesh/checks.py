"""Checks of request fields; each raises InvalidArgumentError naming the field."""

import uuid
from collections.abc import Sequence

from mesh.errors import InvalidArgumentError


def required_id(field: str, value: int) -> int:
    """A 64-bit id other than 0."""
    if value == 0:
        raise InvalidArgumentError(field, "Required.")
    return value


def page_size(value: int, *, default: int = 20, maximum: int = 100) -> int:
    """AIP-158: 0 is the default, above the maximum is the maximum, negative is refused."""
    if value < 0:
        raise InvalidArgumentError("page_size", "Must not be negative.")
    return min(value, maximum) or default


def batch(field: str, values: Sequence[int], maximum: int) -> list[int]:
    """1 to `maximum` ids, none 0; repeats removed, order kept."""
    if not values:
        raise InvalidArgumentError(field, "At least one is required.")
    if len(values) > maximum:
        raise InvalidArgumentError(field, f"At most {maximum:,} at once.")
    if 0 in values:
        raise InvalidArgumentError(field, "0 is no id.")
    return list(dict.fromkeys(values))


def request_id(value: str) -> str:
    """Empty, or a UUID (AIP-155) in its canonical form."""
    if not value:
        return ""
    try:
        parsed = str(uuid.UUID(value)) if len(value) == 36 else ""
    except ValueError:
        parsed = ""
    if parsed != value.lower():
        raise InvalidArgumentError("request_id", "Must be a UUID such as 8-4-4-4-12 hex digits.")
    return parsed
