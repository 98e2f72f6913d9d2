"""The `starling` command. Exit status: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import grpc

from cli import operations, people, tweets
from cli.app import Where
from cli.client import NotPossibleError, Targets
from cli.failures import line_of
from launcher import data_folder
from launcher.data_folder import DataFolderError

FC = TypeVar("FC", bound=Callable[..., Any])


def _target(area: str) -> Callable[[FC], FC]:
    return click.option(
        f"--target-{area}",
        envvar=f"STARLING_{area.upper()}_TARGET",
        show_envvar=True,
        default="",
        metavar="HOST:PORT",
        help=f"Where {area}_svc is, when elsewhere.",
    )


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--data",
    envvar=data_folder.VARIABLE,
    default=data_folder.DEFAULT,
    show_default=True,
    show_envvar=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The data folder of a mesh that runs on this machine.",
)
@_target("graph")
@_target("tweet")
@_target("timeline")
@_target("fanout")
@click.pass_context
def starling(
    context: click.Context, data: Path, target_graph: str, target_tweet: str, target_timeline: str, target_fanout: str
) -> None:
    """Home timelines that are exact.

    USER is a handle, with or without @. Without --target-… options the mesh is the one that `make run` started
    here; a mesh elsewhere also wants a token in STARLING_TOKEN, and everything is done as whom it speaks for.
    """
    fanout = {"fanout_svc": target_fanout} if target_fanout else {}
    targets = Targets(graph=target_graph, tweet=target_tweet, timeline=target_timeline, fanout=fanout)
    context.obj = Where(data, targets, os.environ.get("STARLING_TOKEN", ""))


for command in (*people.COMMANDS, *tweets.COMMANDS, *operations.COMMANDS):
    starling.add_command(command)


def main() -> None:
    """Run the command line; every failure is one line on stderr."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit status."""
    try:
        return int(starling.main(list(arguments), prog_name="starling", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # the reader of a pipe has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (grpc.aio.AioRpcError, NotPossibleError, DataFolderError, OSError) as error:
        line = line_of(error) if isinstance(error, grpc.aio.AioRpcError) else str(error)
        click.echo(f"{click.style('Error:', fg='red')} {line}", err=True)
    return 1


if __name__ == "__main__":
    main()
