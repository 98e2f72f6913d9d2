"""What a home timeline holds, in a few lines: filter all tweets by the viewer's rules, sort by id, show each once."""

from dataclasses import dataclass, field

RETWEETS_REMEMBERED = 256


@dataclass
class ModelTweet:
    author: int
    text: str
    answers: int = 0
    """The tweet that it answers; 0: none."""
    quotes: int = 0
    original: int = 0
    """It is a retweet of that tweet; 0: it isn't one."""
    deleted: bool = False


@dataclass
class Model:
    users: list[int] = field(default_factory=list)
    tweets: dict[int, ModelTweet] = field(default_factory=dict)
    follows: set[tuple[int, int]] = field(default_factory=set)
    blocks: set[tuple[int, int]] = field(default_factory=set)
    mutes: set[tuple[int, int]] = field(default_factory=set)
    likes: set[tuple[int, int]] = field(default_factory=set)

    def near(self, viewer: int, user: int) -> bool:
        return user == viewer or (viewer, user) in self.follows

    def blocked(self, one: int, other: int) -> bool:
        return bool({(one, other), (other, one)} & self.blocks)

    def hides(self, viewer: int, user: int) -> bool:
        return self.blocked(viewer, user) or (viewer, user) in self.mutes

    def sees(self, viewer: int, tweet: ModelTweet) -> bool:
        """Whether a tweet has its own place in the viewer's home."""
        if tweet.deleted or not self.near(viewer, tweet.author) or self.hides(viewer, tweet.author):
            return False
        answered = self.tweets[tweet.answers].author if tweet.answers else viewer
        return tweet.author == viewer or self.near(viewer, answered)

    def sees_retweet(self, viewer: int, retweet: ModelTweet) -> bool:
        """Whether it is seen, if none of the same original was shown before."""
        original = self.tweets[retweet.original]
        near = self.near(viewer, retweet.author) and not self.hides(viewer, retweet.author)
        gone = retweet.deleted or original.deleted or self.hides(viewer, original.author)
        return near and not gone and not self.sees(viewer, original)

    def could_see(self, viewer: int) -> set[int]:
        """All that a page may show while something is in flight."""
        return {i for i, t in self.tweets.items() if (self.sees_retweet if t.original else self.sees)(viewer, t)}

    def home(self, viewer: int) -> list[int]:
        items: list[int] = []
        shown: list[int] = []
        for tweet_id in sorted(self.could_see(viewer), reverse=True):
            if original := self.tweets[tweet_id].original:
                if original in shown[-RETWEETS_REMEMBERED:]:
                    continue
                shown.append(original)
            items.append(tweet_id)
        return items

    def profile(self, author: int) -> list[int]:
        mine = (t for t, tweet in self.tweets.items() if tweet.author == author and not tweet.deleted)
        return sorted(mine, reverse=True)

    def retweet_of(self, author: int, original: int) -> int:
        """The author's retweet of a tweet; 0: none."""
        mine = (t for t in self.profile(author) if self.tweets[t].original == original)
        return next(mine, 0)
