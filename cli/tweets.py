"""Commands about tweets and timelines."""

import uuid
from collections.abc import Sequence
from typing import Any

import click

from cli.app import Session, local_time, mesh_command, safe, to_json
from cli.paging import paged, show
from starling.timeline.v1 import timeline_pb2
from starling.tweet.v1 import tweet_pb2

_LIMIT_MAX = 100


class _TweetId(click.ParamType[int]):
    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """See click."""
        text = str(value)
        if not (text.isascii() and text.isdigit() and len(text) <= 20 and 0 < int(text) < 1 << 64):
            self.fail(f"{text!r} is no tweet id.", param, ctx)
        return int(text)


TWEET_ID = _TweetId()


@click.command()
@click.argument("user", metavar="USER")
@click.argument("text")
@click.option("--reply-to", type=TWEET_ID, default=None, metavar="ID", help="The tweet to answer.")
@click.option("--quote", type=TWEET_ID, default=None, metavar="ID", help="The tweet to quote.")
@click.option("--media", multiple=True, metavar="ID", help="A media id; up to four times.")
@click.option(
    "--request-id",
    type=click.UUID,
    default=None,
    help="Makes a repeat safe: for 24 h the same id gives the same tweet.",
)
@mesh_command
async def post(
    session: Session,
    user: str,
    text: str,
    reply_to: int | None,
    quote: int | None,
    media: Sequence[str],
    request_id: uuid.UUID | None,
) -> None:
    """Post TEXT as USER. USER's next `home` is sure to show it."""
    author = await session.user(user)
    reply = await session.client.post(
        author.user_id,
        text,
        in_reply_to_tweet_id=reply_to or 0,
        quoted_tweet_id=quote or 0,
        media_ids=media,
        request_id=str(request_id or uuid.uuid4()),
    )
    session.recent_posts.remember(author.user_id, reply.read_your_write_token)
    session.answer(to_json(reply), f"Posted {reply.tweet.tweet_id}")


@click.command()
@click.argument("user", metavar="USER")
@click.argument("tweet_id", type=TWEET_ID)
@mesh_command
async def delete(session: Session, user: str, tweet_id: int) -> None:
    """Delete USER's tweet TWEET_ID, for good."""
    await session.client.delete((await session.user(user)).user_id, tweet_id)
    session.answer({"tweetId": str(tweet_id)}, f"Deleted {tweet_id}")


@click.command()
@click.argument("user", metavar="USER")
@paged(_LIMIT_MAX)
@click.option(
    "--newer-than",
    type=TWEET_ID,
    default=None,
    metavar="ID",
    help="Only tweets that may have come since ID was the newest: down to a minute before it.",
)
@mesh_command
async def home(
    session: Session, user: str, limit: int, page_token: str, everything: bool, newer_than: int | None
) -> None:
    """Show USER's home timeline, newest first.

    With --newer-than, tweets of the last minute before ID are shown as well, since one of them may have been committed
    after it; a next page wants the same ID.
    """
    viewer_id = (await session.user(user)).user_id
    own = session.recent_posts.token(viewer_id)

    async def page(token: str) -> tuple[Sequence[timeline_pb2.HomeTimelineItem], str]:
        reply = await session.client.home_page(viewer_id, limit, token, own, newer_than or 0)
        return [item for item in reply.items if item.tweet.tweet_id != newer_than], reply.next_page_token

    def line(item: timeline_pb2.HomeTimelineItem) -> str:
        return _line(item.tweet, item.author.handle)

    await show(session, "items", page, line, page_token=page_token, everything=everything)


@click.command()
@click.argument("user", metavar="USER")
@paged(_LIMIT_MAX)
@mesh_command
async def profile(session: Session, user: str, limit: int, page_token: str, everything: bool) -> None:
    """Show USER's own tweets, newest first."""
    author = await session.user(user)

    async def page(token: str) -> tuple[Sequence[tweet_pb2.Tweet], str]:
        reply = await session.client.profile_page(author.user_id, limit, token)
        return reply.tweets, reply.next_page_token

    def line(tweet: tweet_pb2.Tweet) -> str:
        return _line(tweet, author.handle)

    await show(session, "tweets", page, line, page_token=page_token, everything=everything)


def _line(tweet: tweet_pb2.Tweet, handle: str) -> str:
    start = f"{local_time(tweet.created_at)}  {tweet.tweet_id}  "
    text = safe(tweet.text).replace("\n", "\n" + " " * len(start))
    return f"{start}{click.style(f'@{handle}', bold=True)}  {text}"


COMMANDS: tuple[click.Command, ...] = (post, delete, home, profile)
