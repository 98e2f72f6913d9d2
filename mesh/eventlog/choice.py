"""Which log a service uses: what STARLING_EVENTLOG_URL says, or Valkey Streams."""

from collections.abc import Sequence
from typing import Protocol

from mesh.config import Config
from mesh.eventlog.port import Consumer, LagReader, Producer, Topic
from mesh.eventlog.valkey_streams import StreamsConsumer, StreamsLagReader, StreamsProducer
from mesh.valkey import Valkey


class EventLog(Protocol):
    """A log, and a process's share in it."""

    def producer(self, topics: Sequence[Topic]) -> Producer:
        """Appends to these."""
        ...

    def lag_reader(self, topics: Sequence[Topic], group: str) -> LagReader:
        """Sees how far behind a group is in these."""
        ...

    def consumer(self, topic: Topic, group: str, name: str, dead_letters: Topic) -> Consumer:
        """A member of a group; the caller closes it."""
        ...

    async def close(self) -> None:
        """End what this process has of it."""
        ...


def open_log(config: Config, valkey: Valkey) -> EventLog:
    """The configured log; nothing is asked of it yet. `valkey`: the lists' server, with the streams' LIBRARY."""
    if not config.eventlog_url:
        return _Streams(valkey)
    # Whoever doesn't use it needn't load it at each start.
    from mesh.eventlog.kafka import Kafka, KafkaEventLog  # noqa: PLC0415

    async def lists_life() -> str:
        await valkey.ping()
        return valkey.run_id

    return KafkaEventLog(Kafka.at(config.eventlog_url, prefix=config.key_prefix, lists_life=lists_life))


class _Streams:
    def __init__(self, valkey: Valkey) -> None:
        self._valkey = valkey

    def producer(self, topics: Sequence[Topic]) -> StreamsProducer:
        return StreamsProducer(self._valkey, topics)

    def lag_reader(self, topics: Sequence[Topic], group: str) -> StreamsLagReader:
        return StreamsLagReader(self._valkey, topics, group)

    def consumer(self, topic: Topic, group: str, name: str, dead_letters: Topic) -> StreamsConsumer:
        return StreamsConsumer(self._valkey, topics=[topic], group=group, name=name, dead_letters=dead_letters)

    async def close(self) -> None:
        """The client is the caller's."""
