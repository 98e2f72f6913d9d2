"""Commands about tweets and timelines."""

import json
import uuid
from collections.abc import Sequence
from typing import Any

import click
from google.protobuf.timestamp_pb2 import Timestamp

from cli.app import Session, local_time, mesh_command, safe, to_json
from cli.paging import paged, show
from mesh.ids import time_ms_of
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
@click.argument("tweet_id", type=TWEET_ID)
@click.argument("text")
@mesh_command
async def edit(session: Session, user: str, tweet_id: int, text: str) -> None:
    """Give USER's tweet TWEET_ID another TEXT; the one before stays among its revisions."""
    tweet = await session.client.edit((await session.user(user)).user_id, tweet_id, text)
    session.answer(to_json(tweet), f"Edited {tweet_id}, now version {tweet.version}")


@click.command()
@click.argument("tweet_id", type=TWEET_ID)
@paged(_LIMIT_MAX)
@mesh_command
async def revisions(session: Session, tweet_id: int, limit: int, page_token: str, everything: bool) -> None:
    """Show what TWEET_ID's text is and has been, newest first."""

    async def page(token: str) -> tuple[Sequence[tweet_pb2.TweetRevision], str]:
        reply = await session.client.revisions_page(tweet_id, limit, token)
        return reply.revisions, reply.next_page_token

    def line(revision: tweet_pb2.TweetRevision) -> str:
        return _indented(f"{local_time(revision.created_at)}  {revision.version}  ", revision.text)

    await show(session, "revisions", page, line, page_token=page_token, everything=everything)


@click.command()
@click.argument("user", metavar="USER")
@click.argument("tweet_id", type=TWEET_ID)
@mesh_command
async def retweet(session: Session, user: str, tweet_id: int) -> None:
    """Show TWEET_ID to USER's followers; of a retweet, its original."""
    author = await session.user(user)
    reply = await session.client.retweet(author.user_id, tweet_id)
    session.recent_posts.remember(author.user_id, reply.read_your_write_token)
    session.answer(to_json(reply), f"Retweeted {reply.tweet.retweeted_tweet_id} as {reply.tweet.tweet_id}")


@click.command()
@click.argument("user", metavar="USER")
@click.argument("tweet_id", type=TWEET_ID)
@mesh_command
async def unretweet(session: Session, user: str, tweet_id: int) -> None:
    """Take USER's retweet of TWEET_ID back."""
    author = await session.user(user)
    changed = await session.client.undo_retweet(author.user_id, tweet_id)
    verb = "no longer retweets" if changed else "didn't retweet"
    session.answer({"changed": changed}, f"@{author.handle} {verb} {tweet_id}")


@click.command()
@click.argument("user", metavar="USER")
@click.argument("tweet_id", type=TWEET_ID)
@mesh_command
async def like(session: Session, user: str, tweet_id: int) -> None:
    """Let USER like TWEET_ID; of a retweet, its original."""
    liking = await session.user(user)
    changed = await session.client.like(liking.user_id, tweet_id)
    verb = "likes" if changed else "already liked"
    session.answer({"changed": changed}, f"@{liking.handle} {verb} {tweet_id}")


@click.command()
@click.argument("user", metavar="USER")
@click.argument("tweet_id", type=TWEET_ID)
@mesh_command
async def unlike(session: Session, user: str, tweet_id: int) -> None:
    """Let USER like TWEET_ID no more."""
    liking = await session.user(user)
    changed = await session.client.unlike(liking.user_id, tweet_id)
    verb = "no longer likes" if changed else "didn't like"
    session.answer({"changed": changed}, f"@{liking.handle} {verb} {tweet_id}")


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
@click.option("--watch", is_flag=True, help="Show what comes, as it comes, until Ctrl-C; with --json, one item a line.")
@mesh_command
async def home(
    session: Session, user: str, limit: int, page_token: str, everything: bool, newer_than: int | None, watch: bool
) -> None:
    """Show USER's home timeline, newest first. A retweet has its own id, which stands for its original.

    With --newer-than, tweets of the last minute before ID are shown as well, since one of them may have been committed
    after it; a next page wants the same ID.
    """
    viewer_id = (await session.user(user)).user_id
    own = session.recent_posts.token(viewer_id)

    async def page(token: str) -> tuple[Sequence[timeline_pb2.HomeTimelineItem], str]:
        reply = await session.client.home_page(viewer_id, limit, token, own, newer_than or 0)
        return [item for item in reply.items if item.item_id != newer_than], reply.next_page_token

    def line(item: timeline_pb2.HomeTimelineItem) -> str:
        moment = Timestamp()
        moment.FromMilliseconds(time_ms_of(item.item_id))
        retweeter = item.retweeted_by.handle if item.HasField("retweeted_by") else ""
        return _line(moment, item.item_id, item.author.handle, item.tweet.text, retweeter)

    if watch:
        async for item in session.client.watch_home(viewer_id, newer_than or 0):
            click.echo(json.dumps(to_json(item), ensure_ascii=False) if session.as_json else line(item))
    else:
        await show(session, "items", page, line, page_token=page_token, everything=everything)


@click.command()
@click.argument("user", metavar="USER")
@paged(_LIMIT_MAX)
@mesh_command
async def profile(session: Session, user: str, limit: int, page_token: str, everything: bool) -> None:
    """Show USER's own tweets, newest first."""
    author = await session.user(user)
    originals: dict[int, tweet_pb2.Tweet] = {}
    handles: dict[int, str] = {}

    async def page(token: str) -> tuple[Sequence[tweet_pb2.Tweet], str]:
        reply = await session.client.profile_page(author.user_id, limit, token)
        originals.update({made.tweet_id: made.tweet for made in reply.references if made.HasField("tweet")})
        named = sorted({tweet.retweeted_user_id for tweet in reply.tweets} - {0, *handles})
        if not session.as_json:
            handles.update({found.user_id: found.handle for found in await session.client.users(named)})
        return reply.tweets, reply.next_page_token

    def line(tweet: tweet_pb2.Tweet) -> str:
        if not tweet.retweeted_tweet_id:
            return _line(tweet.created_at, tweet.tweet_id, author.handle, tweet.text)
        original = originals.get(tweet.retweeted_tweet_id)
        text = original.text if original else "tweet unavailable"
        of_whom = handles.get(tweet.retweeted_user_id, "?")
        return _line(tweet.created_at, tweet.tweet_id, of_whom, text, author.handle)

    await show(session, "tweets", page, line, page_token=page_token, everything=everything)


def _line(moment: Timestamp, item_id: int, handle: str, text: str, retweeter: str = "") -> str:
    start = f"{local_time(moment)}  {item_id}  "
    whose = click.style(f"@{retweeter or handle}", bold=True) + (f" retweeted @{handle}" if retweeter else "")
    return _indented(start, text, f"{whose}  ")


def _indented(start: str, text: str, whose: str = "") -> str:
    """Further lines of the text stand below the first one's author."""
    return start + whose + safe(text).replace("\n", "\n" + " " * len(start))


COMMANDS: tuple[click.Command, ...] = (
    *(post, delete, edit, revisions, retweet, unretweet, like, unlike),
    *(home, profile),
)
