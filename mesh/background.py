"""Small background loops that several services have."""

import asyncio
import logging
import os
import secrets
import socket
from contextlib import suppress

from mesh.errors import StarlingError
from mesh.ids import Snowflakes

log = logging.getLogger(__name__)

_RENEW_SECONDS = 5.0


def process_name() -> str:
    """Names this process among all that ever were: lease holder, consumer."""
    return f"{socket.gethostname()[:32]}-{os.getpid()}-{secrets.token_hex(4)}"


async def keep_lease(snowflakes: Snowflakes, stopping: asyncio.Event) -> None:
    """Renew the lease on the worker number until `stopping`; while the store is away ids go on to its end."""
    while not stopping.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), _RENEW_SECONDS)
        try:
            await snowflakes.renew()
        except StarlingError as error:
            log.warning("the lease on the worker number isn't renewed: %s", error)
