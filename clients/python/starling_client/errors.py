"""What a failed call says (AIP-193): a stable reason, the fields at fault, and when to come again."""

from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2


@dataclass(frozen=True, slots=True)
class Explanation:
    """`reason`: UPPER_SNAKE_CASE, or the status's name. `fields`: proto path to what is wrong with it.
    `retry_after_seconds`: 0 when the server says nothing of it."""

    code: grpc.StatusCode
    reason: str
    message: str
    fields: dict[str, str]
    retry_after_seconds: float


def explain(error: grpc.RpcError) -> Explanation:
    """Of an error that a call raised, in either kind of API."""
    code, message = error.code(), error.details() or ""
    reason, fields, retry_after = code.name, dict[str, str](), 0.0
    metadata: Any = error.trailing_metadata() or ()
    for name, value in metadata:
        if name != "grpc-status-details-bin":
            continue
        for detail in status_pb2.Status.FromString(value).details:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                reason = error_details_pb2.ErrorInfo.FromString(detail.value).reason
            elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                violations = error_details_pb2.BadRequest.FromString(detail.value).field_violations
                fields = {violation.field: violation.description for violation in violations}
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
                retry_after = delay.seconds + delay.nanos / 1e9
    return Explanation(code, reason, message, fields, retry_after)
