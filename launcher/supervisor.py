"""All children together: started in order, kept running, stopped the other way round."""

import asyncio
import os
import signal
import time

from launcher.children import Child, Spec
from launcher.data_folder import DataFolder, Mesh
from launcher.output import Output
from launcher.plan import Plan

START_SECONDS = 30.0
STOP_SECONDS = 15.0
VALKEY_STOP_SECONDS = 10.0
_KILL_SECONDS = 5.0


class NotServingError(Exception):
    """Something didn't come up in time; the text says what."""


class Supervisor:
    """See the module. `failed` gets the error of a child that can't be kept running."""

    def __init__(self, plan: Plan, folder: DataFolder, lock: int, output: Output) -> None:
        self._plan = plan
        self._folder = folder
        self._lock = lock
        self._output = output
        self._valkey = [self._child(plan.valkey)] if plan.valkey else []
        self._services = [self._child(spec) for spec in plan.services]
        self._keepers: dict[Child, asyncio.Task[None]] = {}
        self._up = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _child(self, spec: Spec) -> Child:
        return Child(spec, self._output, self._lock, self._started)

    async def start(self) -> None:
        """Returns when all serve. Raises NotServingError."""
        began = time.monotonic()
        await self._begin(self._valkey, began)
        await self._begin(self._services, began)
        self._up = True
        self._publish()

    async def _begin(self, children: list[Child], began: float) -> None:
        if not children:
            return
        for child in children:
            keeper = self._keepers[child] = asyncio.create_task(child.keep())
            keeper.add_done_callback(self._kept)
        waiting = {asyncio.create_task(child.serving.wait()): child for child in children}
        try:
            left = max(0.0, began + START_SECONDS - time.monotonic())
            _, late = await asyncio.wait(waiting, timeout=left)
        finally:
            for task in waiting:
                task.cancel()
        if late:
            names = ", ".join(waiting[task].spec.name for task in late)
            raise NotServingError(f"not serving within {START_SECONDS:.0f} s: {names}; the lines above may say why")

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (error := keeper.exception()) and not self.failed.done():
            self.failed.set_exception(error)

    def _started(self) -> None:
        if self._up:
            self._publish()

    def _publish(self) -> None:
        children = [*self._valkey, *self._services]
        mesh = Mesh(
            graph=self._plan.graph.address,
            tweet=self._plan.tweet.address,
            timeline=self._plan.timeline.address,
            fanout={spec.name: spec.address for spec in self._plan.fanout},
            edge=f"http://{self._plan.edge.address}",
            valkey_url=self._plan.valkey_url,
            pids={"launcher": os.getpid(), **{child.spec.name: child.pid for child in children if child.pid}},
        )
        try:
            self._folder.write_mesh(mesh)
        except OSError as error:
            self._output.line(
                "", f"mesh.json can't be written ({error.strerror}): the command line won't find the mesh"
            )

    def kill(self) -> None:
        """End all at once."""
        for child in (*self._valkey, *self._services):
            child.end_restarts()
            child.signal(signal.SIGKILL)

    async def stop(self) -> None:
        """Stop the services, who needs others first, then Valkey."""
        self._up = False
        self._folder.remove_mesh()
        for child in self._keepers:
            child.end_restarts()
        end = time.monotonic() + STOP_SECONDS
        for child in reversed(self._services):
            await self._stop(child, end - time.monotonic())
        for child in self._valkey:
            await self._stop(child, VALKEY_STOP_SECONDS)

    async def _stop(self, child: Child, seconds: float) -> None:
        keeper = self._keepers.get(child)
        if keeper is None:
            return
        child.signal(signal.SIGTERM)
        _, late = await asyncio.wait([keeper], timeout=max(0.0, seconds))
        if late:
            self._output.line("", f"{child.spec.name} doesn't stop in time: it is killed")
            child.signal(signal.SIGKILL)
            await asyncio.wait([keeper], timeout=_KILL_SECONDS)
