"""Domain errors. They know nothing of SQL, Valkey or gRPC; `mesh.server` alone turns them into statuses.

Every error carries a stable `reason` (UPPER_SNAKE_CASE) that clients may test for, and a message for people.
"""

DOMAIN = "starling"


class StarlingError(Exception):
    """Base: `reason` for programs, `message` for people, `metadata` for both."""

    reason = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None, **metadata: str) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or type(self).reason
        self.metadata = metadata


class InvalidArgumentError(StarlingError):
    """The request is wrong whatever the state; must not be retried. `field` is the proto path."""

    reason = "INVALID_ARGUMENT"

    def __init__(self, field: str, message: str, *, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.field = field


class UnauthenticatedError(StarlingError):
    """No principal, or one that can't be verified."""

    reason = "UNAUTHENTICATED"


class PermissionDeniedError(StarlingError):
    """The principal may not do this; must not be retried."""

    reason = "PERMISSION_DENIED"


class NotFoundError(StarlingError):
    """The named thing is not there."""

    reason = "NOT_FOUND"


class AlreadyExistsError(StarlingError):
    """Somebody else holds the name."""

    reason = "ALREADY_EXISTS"


class FailedPreconditionError(StarlingError):
    """The state forbids it; must not be retried until the state changes."""

    reason = "FAILED_PRECONDITION"


class AbortedError(StarlingError):
    """Lost a race; may be retried from the start."""

    reason = "ABORTED"


class ResourceExhaustedError(StarlingError):
    """Too much at once; may be retried after `retry_after_seconds`."""

    reason = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after_seconds: float, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_seconds = retry_after_seconds


class ConfigurationError(Exception):
    """This process can't run as it was told to; the text names the variable. Trying again can't help."""


class UnavailableError(StarlingError):
    """A server or store doesn't answer; may be retried. Nothing is known of the effect."""

    reason = "UNAVAILABLE"
