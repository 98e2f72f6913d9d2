"""`python -m timeline_svc.reconcile`: takes the ids of deleted tweets out of home and author lists.

Readers don't show them, but each costs its place in the list, and a look-up whenever its page is read. It goes over
all lists, at most so many ids a second, and may run beside everything, at any time, as often as one likes. It is told
what timeline_svc is told.

It prints one line of what it did. Exit status: 0, or 1 when Valkey or tweet_svc didn't answer.
"""

import asyncio
import sys
import time

from pydantic import Field

from mesh import channels, principals
from mesh.clock import SystemClock
from mesh.config import load
from mesh.errors import StarlingError
from mesh.timelines.port import Timelines
from mesh.timelines.valkey import ValkeyTimelines
from mesh.valkey_cluster import connect_to
from timeline_svc.__main__ import TimelineConfig
from timeline_svc.peers import Tweets

_KNOWN_MAX = 1_000_000
"""Ids that are remembered: many lists hold the same."""


class ReconcileConfig(TimelineConfig):
    """And how fast."""

    reconcile_rows_per_second: int = Field(2_000, ge=1)
    """How many ids are looked at."""


class Reconciler:
    """See the module. `run` raises UnavailableError; what was removed is removed."""

    def __init__(self, timelines: Timelines, tweets: Tweets, ids_per_second: float) -> None:
        self._timelines = timelines
        self._tweets = tweets
        self._ids_per_second = ids_per_second
        self._known: dict[int, bool] = {}
        """Whether it was deleted."""
        self.lists = 0
        self.removed = 0

    async def run(self) -> None:
        """Over all lists, once."""
        async for lists in self._timelines.walk():
            begun = time.monotonic()
            asked = await self._look_up(sorted({tweet_id for _, ids in lists for tweet_id in ids}))
            for key, ids in lists:
                if deleted := [tweet_id for tweet_id in ids if self._known[tweet_id]]:
                    self.removed += await self._timelines.remove(key, deleted)
            self.lists += len(lists)
            await asyncio.sleep(max(0.0, asked / self._ids_per_second - (time.monotonic() - begun)))

    async def _look_up(self, tweet_ids: list[int]) -> int:
        """Learn of those that aren't known; how many that were."""
        if len(self._known) + len(tweet_ids) > _KNOWN_MAX:
            self._known.clear()
        unknown = [tweet_id for tweet_id in tweet_ids if tweet_id not in self._known]
        deleted = await self._tweets.deleted(unknown)
        self._known |= {tweet_id: tweet_id in deleted for tweet_id in unknown}
        return len(unknown)


async def _main(config: ReconcileConfig) -> None:
    valkey = connect_to(config.valkey_url, key_prefix=config.key_prefix)
    channel = channels.connect(config.tweet_target, max_message_bytes=config.max_message_bytes)
    credentials = principals.Credentials(config.auth_secret.get_secret_value(), principals.service("timeline_svc"))
    tweets = Tweets(channel, credentials)
    reconciler = Reconciler(ValkeyTimelines(valkey, SystemClock()), tweets, config.reconcile_rows_per_second)
    try:
        await reconciler.run()
        print(f"{reconciler.lists:,} lists; removed: {reconciler.removed:,} ids of deleted tweets")  # noqa: T201
    finally:
        await channel.close()
        await valkey.close()


def main() -> int:
    """The command."""
    try:
        asyncio.run(_main(load(ReconcileConfig)))
    except StarlingError as error:
        print(f"reconcile: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
