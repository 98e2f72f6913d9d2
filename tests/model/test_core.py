"""The pure core of a page against the model: the same tweets, any worlds, any sizes of pages."""

from hypothesis import given
from hypothesis import strategies as st

from starling.tweet.v1.tweet_pb2 import Tweet
from tests.model.reference import Model, ModelTweet
from timeline_svc.core import Page, ViewerContext

USERS = range(1, 6)
users = st.sampled_from(USERS)
pairs = st.sets(st.tuples(users, users).filter(lambda pair: pair[0] != pair[1]), max_size=12)


@st.composite
def worlds(draw: st.DrawFn) -> Model:
    model = Model(users=list(USERS), blocks=draw(pairs), mutes=draw(pairs))
    model.follows = {pair for pair in draw(pairs) if not model.blocked(*pair)}
    for tweet_id in range(1, draw(st.integers(1, 25))):
        posts = [i for i, tweet in model.tweets.items() if not tweet.original]
        referred = draw(st.sampled_from([0, *posts]))
        kind = draw(st.sampled_from(["answers", "quotes", "original"])) if referred else ""
        tweet = ModelTweet(draw(users), "", deleted=draw(st.integers(0, 9)) == 0)
        if kind:
            setattr(tweet, kind, referred)
        if not (tweet.original and model.retweet_of(tweet.author, tweet.original)):
            model.tweets[tweet_id] = tweet
    return model


def message(model: Model, tweet_id: int) -> Tweet | None:
    tweet = model.tweets[tweet_id]
    if tweet.deleted:
        return None
    answered, original = model.tweets.get(tweet.answers), model.tweets.get(tweet.original)
    return Tweet(
        tweet_id=tweet_id,
        author_id=tweet.author,
        in_reply_to_tweet_id=tweet.answers,
        in_reply_to_user_id=answered.author if answered else 0,
        retweeted_tweet_id=tweet.original,
        retweeted_user_id=original.author if original else 0,
    )


@given(worlds(), users, st.integers(1, 7))
def test_pages_hold_what_the_model_holds(model: Model, viewer_id: int, size: int) -> None:
    def whom(pairs: set[tuple[int, int]]) -> list[int]:
        return sorted(other for one, other in pairs if one == viewer_id)

    blockers = {user: (user, viewer_id) in model.blocks for user in USERS if user != viewer_id}
    followees = whom(model.follows)
    viewer = ViewerContext(
        viewer_id, 1, followees, [1] * len(followees), whom(model.blocks), whom(model.mutes), blockers
    )
    shown: list[int] = []
    page = Page(size)
    for tweet_id in sorted(model.tweets, reverse=True):
        tweet = message(model, tweet_id)
        original = message(model, tweet.retweeted_tweet_id) if tweet and tweet.retweeted_tweet_id else None
        page.examine(tweet_id, tweet, viewer, original)
        if page.full:
            shown += [item.item_id for item in page.items]
            page = Page(size, retweeted=page.retweeted)
    assert [*shown, *(item.item_id for item in page.items)] == model.home(viewer_id)
