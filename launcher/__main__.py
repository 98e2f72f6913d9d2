"""Runs the whole mesh on this machine: `python -m launcher`, or `make run`.

Exit status: 0 after a stop that was asked for, 1 when something couldn't be started, 2 for a wrong configuration,
130 after a second Ctrl-C.
"""

import asyncio
import os
import shlex
import signal
import sys
from pathlib import Path

from pydantic import ValidationError

from launcher import data_folder, plan
from launcher.children import MisconfiguredError
from launcher.config import LauncherConfig
from launcher.data_folder import DataFolder, DataFolderError
from launcher.output import Output
from launcher.plan import SLOW_WORKER, VALKEY, NotBuiltError, Plan, PortInUseError, without_login
from launcher.supervisor import NotServingError, Supervisor
from launcher.valkey_server import NoValkeyServerError, find_valkey_server

_LAST_LINES_SECONDS = 2.0
_NAME_WIDTH = len(SLOW_WORKER)


def main() -> int:
    """Returns the exit status."""
    try:
        config = LauncherConfig()
    except ValidationError as error:
        for problem in error.errors(include_input=False, include_url=False):
            print(f"configuration: STARLING_{str(problem['loc'][0]).upper()}: {problem['msg']}", file=sys.stderr)
        return 2
    folder = DataFolder(config.data)
    try:
        lock = folder.open()
        planned = plan.make(config, folder, folder.secrets(), find_valkey_server, os.environ)
    except (DataFolderError, NoValkeyServerError, NotBuiltError, PortInUseError) as error:
        print(f"launcher: {error}", file=sys.stderr)
        return 1
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    output = Output(sys.stdout.fileno(), coloured=coloured, width=_NAME_WIDTH)
    for name in sorted(plan.SET_HERE & os.environ.keys()):
        output.line("", f"{name} is the launcher's to set: yours isn't used")
    try:
        return asyncio.run(_run(planned, folder, lock, output))
    finally:
        output.close(_LAST_LINES_SECONDS)


async def _run(planned: Plan, folder: DataFolder, lock: int, output: Output) -> int:
    folder.remove_mesh()  # a launcher that was killed leaves it
    supervisor = Supervisor(planned, folder, lock, output)
    stop = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
            supervisor.kill()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    valkey = "Valkey, " if planned.valkey else ""
    output.line("", f"Starting {valkey}{len(planned.services) - 1} services and the edge on {folder.path}")
    running = asyncio.create_task(_serve(supervisor, planned, folder, output))
    asked = asyncio.create_task(stop.wait())
    await asyncio.wait([running, asked], return_when=asyncio.FIRST_COMPLETED)
    status = _status(running, output)
    stop.set()  # from here on a Ctrl-C is the second one
    output.line("", "Stopping; Ctrl-C again ends everything at once")
    running.cancel()
    asked.cancel()
    await supervisor.stop()
    output.line("", "Stopped")
    return 130 if hurry.is_set() else status


async def _serve(supervisor: Supervisor, planned: Plan, folder: DataFolder, output: Output) -> None:
    """Start all and say so; then nothing is left but to fail."""
    starting = asyncio.create_task(supervisor.start())
    try:
        await asyncio.wait([starting, supervisor.failed], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            for line in banner(planned, folder):
                output.line("", line)
        await supervisor.failed
    finally:
        starting.cancel()


def _status(running: "asyncio.Task[None]", output: Output) -> int:
    """What the end of `_serve` means; still at work means that a stop was asked for."""
    error = running.exception() if running.done() else None
    match error:
        case None:
            return 0
        case MisconfiguredError():
            output.line("", f"{error} refuses its configuration; its lines above name the variable")
            return 2
        case NotServingError():
            output.line("", str(error))
            return 1
        case _:
            output.line("", f"a process can't be started: {error}")
            return 1


def banner(planned: Plan, folder: DataFolder) -> list[str]:
    """Where everything is, and commands to try that work as they stand."""
    command = Path(sys.executable).with_name("starling")
    shown = command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command
    starling = shlex.quote(str(shown))
    default = folder.path == Path(data_folder.DEFAULT)
    elsewhere = [] if default else [f"    export {data_folder.VARIABLE}={shlex.quote(str(folder.path.absolute()))}"]
    return [
        "",
        "  Starling is up. Ctrl-C stops it; the data stay.",
        "",
        *(f"    {spec.name:<{_NAME_WIDTH}}  {spec.address}" for spec in planned.services),
        f"    {VALKEY:<{_NAME_WIDTH}}  {without_login(planned.valkey_url)}",
        f"    {'data':<{_NAME_WIDTH}}  {folder.path.absolute()}",
        "",
        f"  The page: http://{planned.edge.address}/   (the API's document: /docs, the operators' page: /ops)",
        "",
        "  Try this in another terminal:",
        "",
        *elsewhere,
        f"    {starling} user create alice",
        f"    {starling} user create bob",
        f"    {starling} follow bob alice",
        f'    {starling} post alice "Good morning from the reeds"',
        f"    {starling} home bob",
        f"    {starling} status",
        f"    {starling} --help",
        "",
    ]


if __name__ == "__main__":
    sys.exit(main())
