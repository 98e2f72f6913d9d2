"""What went wrong, in one line for people."""

import grpc
from google.rpc import error_details_pb2

from mesh.channels import details_of


def line_of(error: grpc.aio.AioRpcError) -> str:
    """The server's message, then in brackets status, reason and field."""
    info, fields = error_details_pb2.ErrorInfo(), list[str]()
    bad_request = error_details_pb2.BadRequest()
    for detail in details_of(error):
        if detail.Unpack(bad_request):
            fields += [violation.field for violation in bad_request.field_violations]
        else:
            detail.Unpack(info)
    code = error.code()
    if not info.reason and code is grpc.StatusCode.UNAVAILABLE:
        return f"a service doesn't answer; does the mesh run? 'make run' starts it ({_short(error)})"
    if not info.reason and code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time; it may have been done nevertheless (DEADLINE_EXCEEDED)"
    message = (error.details() or "no message").rstrip(".")
    for named in fields:
        message = message.removeprefix(f"{named}: ")  # it is in the brackets
    about = "".join(f", {name} {value}" for name, value in sorted(info.metadata.items()))
    reason = f" {info.reason}" if info.reason and info.reason != code.name else ""
    field = f", field {', '.join(fields)}" if fields else ""
    return f"{_one_line(message)}{about} ({code.name}{reason}{field})"


def _short(error: grpc.aio.AioRpcError) -> str:
    return f"UNAVAILABLE: {_one_line(error.details() or '')[:160]}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
