"""The log's names, and the shapes of its topics: what producers and consumers must agree on."""

from mesh.eventlog.port import Topic

# Key: the author's id. 8 partitions × 50,000 records of about 50 bytes: 20 MB of Valkey, some minutes of
# fan-out at full load, and hours of replay at an ordinary one.
TWEET_FANOUT = Topic("tweet-fanout", partitions=8, records_max=50_000)

# Key: author and bucket, so that a big author's buckets spread over the partitions and lag counts real work: one
# record is up to 10,000 deliveries.
FANOUT_TASKS = Topic("fanout-tasks", partitions=16, records_max=50_000)

# What may wait: drains, retweets of hot tweets, and big authors' buckets while fan-out is behind. Workers give it few
# hands, so that it never delays the others.
FANOUT_TASKS_SLOW = Topic("fanout-tasks-slow", partitions=4, records_max=50_000)

# Trimmed from its oldest, acknowledged or not: dead letters must never stop the living.
FANOUT_DEAD_LETTERS = Topic("fanout-dead-letters", partitions=1, records_max=10_000, keep_seconds=30 * 86_400.0)

FANOUT_WORKERS = "fanout-workers"
