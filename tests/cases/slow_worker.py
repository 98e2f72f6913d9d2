"""A worker process for K1: the real worker on a real log, whose writes for one author take long.

`python -m tests.cases.slow_worker LOG_URL PREFIX VALKEY_URL JOURNAL`; it notes in the journal when it begins with an
event of the slow author, and after each chunk: `<pid> <what>`. The log has one topic, TOPIC.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fanout_svc.worker import Figures, Worker
from mesh.clock import SystemClock
from mesh.eventlog.kafka import Kafka, KafkaConsumer
from mesh.eventlog.port import Topic
from mesh.timelines.valkey import LIBRARY, ValkeyTimelines
from mesh.valkey import Valkey
from starling.graph.v1 import graph_pb2

TOPIC = Topic("slow-fanout", 4, 1_000)
DEAD_LETTERS = Topic("slow-dead-letters", 1, 100)
GROUP = "workers"
POLL_INTERVAL_SECONDS = 10.0
SLOW_AUTHOR = 1
CHUNKS = 15
CHUNK_SECONDS = 1.0
FOLLOWERS = range(100, 100 + 2 * CHUNKS)


class SlowPeers:
    """Everybody follows everybody; the slow author's followers come slowly, 15 s in all."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal

    async def mode(self, author_id: int, followers_below: int = 0) -> graph_pb2.GetAuthorModeResponse:
        return graph_pb2.GetAuthorModeResponse(mode=graph_pb2.AUTHOR_MODE_PUSH, bucket_count=1)

    async def followers(self, author_id: int, bucket: int | None) -> AsyncIterator[Sequence[int]]:
        if author_id != SLOW_AUTHOR:
            yield FOLLOWERS
            return
        self._note("begins")
        for number in range(CHUNKS):
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), CHUNK_SECONDS)
            yield FOLLOWERS[2 * number : 2 * number + 2]
            self._note("chunk")
        self._note("ends")

    def _note(self, what: str) -> None:
        with self._journal.open("a") as journal:
            journal.write(f"{os.getpid()} {what}\n")


async def main(log_url: str, prefix: str, valkey_url: str, journal: str) -> None:
    nothing: Any = None
    peers: Any = SlowPeers(Path(journal))
    valkey = Valkey(valkey_url, key_prefix=prefix, libraries=[LIBRARY])
    consumer = KafkaConsumer(
        Kafka.at(log_url, prefix=prefix),
        topic=TOPIC,
        group=GROUP,
        name=f"worker-{os.getpid()}",
        dead_letters=DEAD_LETTERS,
        poll_interval_seconds=POLL_INTERVAL_SECONDS,
    )
    worker = Worker(
        consumer=consumer,
        producer=nothing,
        timelines=ValkeyTimelines(valkey, SystemClock()),
        bodies=nothing,
        peers=peers,
        clock=SystemClock(),
        figures=Figures(),
    )
    await worker.run(asyncio.Event())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
