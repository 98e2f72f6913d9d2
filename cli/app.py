"""What all commands share: where the mesh is, `--json`, and an event loop."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC
from functools import wraps
from pathlib import Path
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from cli.client import Client, GivenToken, NotPossibleError, Targets
from cli.recent_posts import RecentPosts
from launcher.data_folder import DataFolder, Mesh
from starling.graph.v1 import graph_pb2


@dataclass(frozen=True, slots=True)
class Session:
    """One command's mesh, and how it is to answer."""

    where: "Where"
    client: Client
    recent_posts: RecentPosts
    as_json: bool

    async def user(self, handle: str) -> graph_pb2.User:
        """A user as people write one: a handle, with or without @."""
        return await self.client.user(handle.removeprefix("@"))

    def answer(self, content: dict[str, Any], *lines: str) -> None:
        """Print the content as JSON, or the lines for people."""
        if self.as_json:
            click.echo(json.dumps(content, ensure_ascii=False, indent=2))
        else:
            for line in lines:
                click.echo(line)


@dataclass(frozen=True, slots=True)
class Where:
    """What the group's options say."""

    data: Path
    targets: Targets
    token: str

    def client(self) -> Client:
        """A client for it. Raises NotPossibleError."""
        folder = DataFolder(self.data)
        if self.targets.named():
            if not self.token:
                raise NotPossibleError("a mesh elsewhere wants a token: set STARLING_TOKEN")
            return Client(self.targets, GivenToken(self.token))
        client = Client.of(folder)
        return Client(client.targets, GivenToken(self.token)) if self.token else client

    def secret(self) -> str:
        """The development secret. Raises NotPossibleError, DataFolderError."""
        if self.targets.named():
            raise NotPossibleError("tokens are made on the machine that runs the mesh")
        return DataFolder(self.data).read_secrets().auth_secret

    def mesh(self) -> Mesh | None:
        """What a launcher says that it runs, unless the mesh is elsewhere."""
        return None if self.targets.named() else DataFolder(self.data).read_mesh()


def mesh_command(work: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Give a command `--json` and a Session as its first argument, and run it."""

    @click.option("--json", "as_json", is_flag=True, help="Answer in JSON; 64-bit numbers are strings.")
    @click.pass_context
    @wraps(work)
    def command(context: click.Context, /, *, as_json: bool, **arguments: Any) -> None:
        where: Where = context.obj

        async def run() -> None:
            async with where.client() as client:
                await work(Session(where, client, RecentPosts(where.data), as_json), **arguments)

        asyncio.run(run())

    return command


def to_json(message: Message) -> dict[str, Any]:
    """A message as protobuf's JSON: lowerCamelCase, 64-bit numbers as strings, empty fields too."""
    return dict(MessageToDict(message, always_print_fields_with_no_presence=True))


_COMMANDING = {code: "�" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) != "\n"}


def safe(text: str) -> str:
    """Text of others for a terminal: without control characters, which would command it."""
    return text.translate(_COMMANDING)


def local_time(moment: Timestamp) -> str:
    """For people, in the machine's time zone."""
    return moment.ToDatetime(UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
