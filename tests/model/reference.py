"""What a home timeline holds, in a few lines: filter all tweets by the viewer's rules, sort by id, cut."""

from dataclasses import dataclass, field


@dataclass
class ModelTweet:
    author: int
    text: str
    answers: int = 0
    """The author of the tweet that it answers; 0: none."""
    deleted: bool = False


@dataclass
class Model:
    users: list[int] = field(default_factory=list)
    tweets: dict[int, ModelTweet] = field(default_factory=dict)
    follows: set[tuple[int, int]] = field(default_factory=set)

    def sees(self, viewer: int, tweet: ModelTweet) -> bool:
        def near(user: int) -> bool:
            return user == viewer or (viewer, user) in self.follows

        return (
            not tweet.deleted
            and near(tweet.author)
            and (tweet.author == viewer or not tweet.answers or near(tweet.answers))
        )

    def home(self, viewer: int) -> list[int]:
        return sorted((t for t, tweet in self.tweets.items() if self.sees(viewer, tweet)), reverse=True)

    def profile(self, author: int) -> list[int]:
        mine = (t for t, tweet in self.tweets.items() if tweet.author == author and not tweet.deleted)
        return sorted(mine, reverse=True)
