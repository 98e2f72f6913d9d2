"""Commands that show a page, or all of them."""

from collections.abc import Callable
from typing import TypeVar

import click
from google.protobuf.message import Message

from cli.app import Session, to_json
from cli.client import Page, pages

C = TypeVar("C", bound=Callable[..., object])
M = TypeVar("M", bound=Message)


def paged(limit_max: int) -> Callable[[C], C]:
    """The options `--limit`, `--page-token` and `--all`."""

    def decorate(command: C) -> C:
        command = click.option("--all", "everything", is_flag=True, help="Page after page, to the end.")(command)
        command = click.option("--page-token", default="", metavar="TOKEN", help="From the page before.")(command)
        return click.option(
            *("--limit", "limit"),
            type=click.IntRange(1, limit_max),
            default=20,
            show_default=True,
            help=f"Items on a page, at most {limit_max:,}.",
        )(command)

    return decorate


async def show(
    session: Session, name: str, page: Page[M], line: Callable[[M], str], *, page_token: str, everything: bool
) -> None:
    """Show the page of a token, or with `everything` all from there; in JSON the items are under `name`."""
    shown = []
    next_token = ""
    async for items, next_token in pages(page, page_token):  # noqa: B007 - used after the loop
        for item in items:
            if session.as_json:
                shown.append(to_json(item))
            else:
                click.echo(line(item))
        if not everything:
            break
    session.answer(
        {name: shown, "nextPageToken": next_token}, *([f"next: --page-token {next_token}"] if next_token else [])
    )
