"""Log lines: text for people, or JSON, one object a line, for machines. Neither ever holds a token or a secret."""

import json
import logging
import sys
import time
from typing import Any

from mesh import tracing

_calls = logging.getLogger("starling.calls")


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, logger, message; trace_id within a call; a call's own fields; error."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": "call" if hasattr(record, "call") else record.getMessage(),
        }
        if traceparent := tracing.current.get():
            line["trace_id"] = tracing.trace_id(traceparent)
        line |= getattr(record, "call", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(level: str, kind: str) -> None:
    """Everything goes to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if kind == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def request(caller: str, method: str, code: str, milliseconds: float, trace_id: str) -> None:
    """The line of one call."""
    call = {"caller": caller, "method": method, "code": code, "ms": round(milliseconds, 1), "trace_id": trace_id}
    text = "call caller=%s method=%s code=%s ms=%.1f trace=%s"
    _calls.info(text, caller, method, code, milliseconds, trace_id, extra={"call": call})
