"""Commands about accounts, and who follows, blocks and mutes whom."""

from collections.abc import Awaitable, Callable, Sequence

import click

from cli.app import Session, local_time, mesh_command, safe, to_json
from cli.paging import paged, show
from mesh import principals
from mesh.principals import OPERATOR, Kind, Principal
from starling.graph.v1 import graph_pb2

_LIMIT_MAX = 1_000


@click.group()
def user() -> None:
    """Accounts."""


@user.command()
@click.argument("handle")
@click.option("--name", default="", help="What people see; the handle unless given.")
@mesh_command
async def create(session: Session, handle: str, name: str) -> None:
    """Register an account: 1 to 15 of A-Z a-z 0-9 _."""
    made = await session.client.create_user(handle.removeprefix("@"), name)
    session.answer(to_json(made), f"Created @{made.handle} ({made.user_id})")


@user.command("show")
@click.argument("handle")
@mesh_command
async def show_user(session: Session, handle: str) -> None:
    """Show an account."""
    found = await session.user(handle)
    session.answer(
        to_json(found),
        _line(found),
        f"id {found.user_id}, since {local_time(found.created_at)}",
        f"followers {found.follower_count:,}, following {found.following_count:,}",
    )


@click.command()
@click.argument("user", metavar="USER")
@click.option(
    "--lifetime-seconds",
    type=click.IntRange(1, 30 * 86_400),
    default=3_600,
    show_default=True,
    help="How long it is valid.",
)
@mesh_command
async def token(session: Session, user: str, lifetime_seconds: int) -> None:
    """Print a development token for USER.

    USER is a handle, `operator`, or `service:NAME`. The token is signed with the secret in the data folder; send it
    as metadata: "authorization: Bearer TOKEN".
    """
    principal = await _principal(session, user)
    minted = principals.mint(session.where.secret(), principal, lifetime_seconds)
    session.answer({"principal": str(principal), "token": minted, "lifetimeSeconds": lifetime_seconds}, minted)


async def _principal(session: Session, name: str) -> Principal:
    if name == str(OPERATOR):
        return OPERATOR
    kind, _, service = name.partition(":")
    if kind == Kind.SERVICE.value and service:
        return principals.service(service)
    return principals.user((await session.user(name)).user_id)


_Change = Callable[[int, int], Awaitable[bool]]


@click.command()
@click.argument("user", metavar="USER")
@click.argument("other", metavar="OTHER")
@mesh_command
async def follow(session: Session, user: str, other: str) -> None:
    """Let USER follow OTHER, from the next read on."""
    await _change(session, user, other, session.client.follow, "follows", "already followed")


@click.command()
@click.argument("user", metavar="USER")
@click.argument("other", metavar="OTHER")
@mesh_command
async def unfollow(session: Session, user: str, other: str) -> None:
    """Let USER follow OTHER no more."""
    await _change(session, user, other, session.client.unfollow, "no longer follows", "didn't follow")


@click.command()
@click.argument("user", metavar="USER")
@click.argument("other", metavar="OTHER")
@mesh_command
async def block(session: Session, user: str, other: str) -> None:
    """Let USER block OTHER: neither follows or sees the other, from the next read on."""
    await _change(session, user, other, session.client.block, "blocks", "already blocked")


@click.command()
@click.argument("user", metavar="USER")
@click.argument("other", metavar="OTHER")
@mesh_command
async def unblock(session: Session, user: str, other: str) -> None:
    """Let USER block OTHER no more; follows don't come back."""
    await _change(session, user, other, session.client.unblock, "no longer blocks", "didn't block")


@click.command()
@click.argument("user", metavar="USER")
@click.argument("other", metavar="OTHER")
@mesh_command
async def mute(session: Session, user: str, other: str) -> None:
    """Hide OTHER from USER's home timeline, from the next read on; follows stay."""
    await _change(session, user, other, session.client.mute, "mutes", "already muted")


@click.command()
@click.argument("user", metavar="USER")
@click.argument("other", metavar="OTHER")
@mesh_command
async def unmute(session: Session, user: str, other: str) -> None:
    """Hide OTHER from USER's home timeline no more."""
    await _change(session, user, other, session.client.unmute, "no longer mutes", "didn't mute")


async def _change(session: Session, user: str, other: str, change: _Change, done: str, before: str) -> None:
    """Do something to another account; say `done`, or `before` when nothing changed."""
    who, whom = await session.user(user), await session.user(other)
    changed = await change(who.user_id, whom.user_id)
    session.answer({"changed": changed}, f"@{who.handle} {done if changed else before} @{whom.handle}")


@click.command()
@click.argument("user", metavar="USER")
@paged(_LIMIT_MAX)
@mesh_command
async def following(session: Session, user: str, limit: int, page_token: str, everything: bool) -> None:
    """List whom USER follows."""
    user_id = (await session.user(user)).user_id
    page = _users(session, lambda token: session.client.following_page(user_id, limit, token))
    await show(session, "users", page, _line, page_token=page_token, everything=everything)


@click.command()
@click.argument("user", metavar="USER")
@paged(_LIMIT_MAX)
@mesh_command
async def followers(session: Session, user: str, limit: int, page_token: str, everything: bool) -> None:
    """List who follows USER."""
    user_id = (await session.user(user)).user_id
    page = _users(session, lambda token: session.client.followers_page(user_id, limit, token))
    await show(session, "users", page, _line, page_token=page_token, everything=everything)


_Ids = Callable[[str], Awaitable[tuple[list[int], str]]]
_Users = Callable[[str], Awaitable[tuple[Sequence[graph_pb2.User], str]]]


def _users(session: Session, ids: _Ids) -> _Users:
    async def page(token: str) -> tuple[Sequence[graph_pb2.User], str]:
        user_ids, next_token = await ids(token)
        return await session.client.users(user_ids), next_token

    return page


def _line(found: graph_pb2.User) -> str:
    return f"@{found.handle:<15}  {safe(found.display_name)}"


COMMANDS: tuple[click.Command, ...] = (
    user,
    token,
    follow,
    unfollow,
    block,
    unblock,
    mute,
    unmute,
    following,
    followers,
)
