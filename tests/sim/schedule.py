"""One run: a small world, processes interleaved by choices, crashes; then everything is finished, and walks are judged.

A schedule is the list of choices, each the number of an option, 0 the plainest: replayed on the same code it gives the
same run. `story` tells it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from mesh.timelines.port import author, home
from tests.sim import protocol
from tests.sim.rules import Rules
from tests.sim.world import Choices, Failure, Mode, Steps, World, is_drain

ACTIONS = ("work", "post", "read", "warm", "follow", "unfollow", "hear", "time", "mode", "mute", "evict")
ACTIONS += ("warm author", "evict author", "failover", "crash")
WEIGHTS = {"work": (3, 6), "time": (0.3, 1), "mode": (0, 0.3, 1), "hear": (0.3, 1), "evict": (0, 0.3, 1)}
WEIGHTS |= {"evict author": (0, 0, 0.3), "failover": (0, 0, 0, 0.5), "crash": (0, 0, 1)}
"""What an action's weight is drawn from, for each seed anew, so that each seed leaves something out."""
OTHER_WEIGHTS = (0, 0, 1, 1, 3)
PACES = (0.1, 2, 8)
DENSITIES = (0.2, 1, 5)
STEPS = (20, 40, 80)
RUNNING_MAX = 6
WORK_MAX = 1_000
JUMPS_MS = (2_000, 6_000, 16_000, 21_000, 31_000)

type_of_start = Callable[[], Steps]


@dataclass(slots=True, eq=False)
class Process:
    """`name`: what it does; `start` begins it; `is_change`: a client waits for it, and may retry;
    `pace`: how readily a seed goes on with it."""

    name: tuple[object, ...]
    start: type_of_start
    is_change: bool = False
    pace: float = 0.0
    steps: Steps = field(init=False)

    def __post_init__(self) -> None:
        self.steps = self.start()


class Run:
    """See the module."""

    def __init__(self, rules: Rules, choices: Choices, *, tells: bool = False) -> None:
        self.choose = choices
        self.w = World(rules, choices)
        self.story: list[str] = []
        self._tells = tells
        self._running: list[Process] = []
        """The one that ran last comes first."""
        self._retries: list[Process] = []

    def go(self) -> None:
        """Raises Failure."""
        self._furnish()
        work_first = self.choose(2) == 1
        self._interleave()
        self.choose.over = True
        if work_first:  # What runs is slower than all the rest.
            self._work()
        self._finish()
        self._judge()

    def _tell(self, *words: object) -> None:
        if self._tells:
            self.story.append(" ".join(map(str, words)))

    def _furnish(self) -> None:
        """Everybody follows, has posted, has a list, is pushed; or not."""
        w = self.w
        users = ", ".join(map(str, w.users))
        self._tell(f"users {users}; lists of {w.lists.cap}; log in {'Valkey' if w.log_in_valkey else 'Kafka'}")
        density = self.choose.random.choice(DENSITIES) if self.choose.random else 1
        for viewer in w.users:
            for user in w.users:
                if user != viewer and not self.choose(2, (density, 1)):
                    self._now("follow", viewer, user)
        for user in w.users:
            for _ in range(self.choose(4)):
                self._now("post", user)
        self._work()
        for user in w.users:
            if not self.choose(2, (2, 1)):
                self._now("warm", user)
            if self.choose(2):
                self._now("warm author", user)
            if self.choose(2, (2, 1)):
                w.graph.set_mode(user, Mode.PULL)
                self._tell("author", user, "→ PULL")
        w.pass_time(protocol.PULL_AGE_MS)
        self._hear()
        for user in w.users:
            if w.graph.modes[user].mode is Mode.PULL and self.choose(2):
                self._now("post", user)
        self._work()
        w.pass_time(protocol.PULL_AGE_MS)
        self._hear()

    def _hear(self) -> None:
        for reader in self.w.readers:
            reader.hear(self.w)
        self.w.worker_modes = dict(self.w.graph.modes)

    def _now(self, action: str, *arguments: int) -> None:
        """Start to end, by itself."""
        self._to_end(self._process(action, *arguments))

    def _to_end(self, process: Process) -> None:
        if process in self._retries:
            self._retries.remove(process)
        while self._step(process):
            pass

    def _process(self, action: str, *arguments: int) -> Process:
        function = getattr(protocol, action.replace(" ", "_"))
        is_change = action in {"follow", "unfollow", "mute"}
        return Process((action, *arguments), partial(function, self.w, *arguments), is_change)

    # Interleaving

    def _interleave(self) -> None:
        weights = self._draw_weights()
        steps = STEPS[self.choose(len(STEPS))]
        while self.choose.left and steps:
            steps -= 1
            others = len(self._running)
            option_weights = [process.pace for process in self._running] + weights
            option = self.choose(others + len(ACTIONS), option_weights)
            if option < others:
                self._step(self._running[option])
            else:
                self._act(ACTIONS[option - others])

    def _draw_weights(self) -> list[float]:
        random, focus = self.choose.random, self.choose.focus
        if random is None:
            return []
        drawn = [WEIGHTS.get(action, OTHER_WEIGHTS) for action in ACTIONS]
        if focus is None:
            return [random.choice(weights) for weights in drawn]
        return [
            random.choice([weight for weight in weights if weight]) if action in focus else 0
            for action, weights in zip(ACTIONS, drawn, strict=True)
        ]

    def _step(self, process: Process) -> bool:
        """False: it is over."""
        if process in self._running:
            self._running.remove(process)
        try:
            did = next(process.steps)
        except StopIteration:
            self._tell(*process.name, "ends")
            return False
        self._tell(*process.name, "→", did)
        if not self.choose.over:
            self._running.insert(0, process)
            random = self.choose.random
            if random and (not process.pace or random.random() < 0.2):
                process.pace = random.choice(PACES)
        return True

    def _act(self, action: str) -> None:
        w, choose = self.w, self.choose
        match action:
            case "work":
                if due := self._due():
                    self._start(due[choose(len(due))])
            case "post" | "warm" | "warm author":
                self._start(self._process(action, self._user()))
            case "read":
                self._start(self._reading())
            case "follow" | "unfollow" | "mute":
                viewer, user = self._user(), self._user()
                arguments = (viewer, user, choose(2)) if action == "mute" else (viewer, user)
                if viewer != user:
                    self._start(self._process(action, *arguments))
            case "mode":
                self._move(self._user())
            case "evict" | "evict author":
                user = self._user()
                w.lists.drop(home(user) if action == "evict" else author(user))
                self._tell("list of", *(("author",) if action != "evict" else ()), user, "evicted")
            case "hear":
                self._hear_one(choose(3))
            case "time":
                jump = JUMPS_MS[choose(len(JUMPS_MS))]
                w.pass_time(jump)
                self._tell(jump // 1_000, "s pass")
            case "failover":
                self._fail_over()
            case "crash" if self._running:
                self._crash(self._running.pop(choose(len(self._running))))

    def _user(self) -> int:
        return self.w.users[self.choose(len(self.w.users))]

    def _start(self, process: Process) -> None:
        if len(self._running) < RUNNING_MAX:
            if process in self._retries:
                self._retries.remove(process)
            self._step(process)

    def _reading(self) -> Process:
        at, viewer, size = self.choose(2), self._user(), (100, 1, 2)[self.choose(3)]
        start = partial(protocol.read, self.w, self.w.readers[at], viewer, size)
        return Process(("reader", at, "reads", size, "for", viewer), start)

    def _move(self, user: int) -> None:
        """PUSH → PULL → DRAIN, and DRAIN → PULL. DRAIN → PUSH is up to the drain tasks."""
        is_pulled = self.w.graph.modes[user].mode is Mode.PULL
        self.w.graph.set_mode(user, Mode.DRAIN if is_pulled else Mode.PULL)
        self._tell("author", user, "→", self.w.graph.modes[user].mode.name)

    def _hear_one(self, which: int) -> None:
        if which < len(self.w.readers):
            self.w.readers[which].hear(self.w)
            self._tell("reader", which, "hears whom to pull")
        else:
            self.w.worker_modes = dict(self.w.graph.modes)

    def _fail_over(self) -> None:
        w = self.w
        if w.handled_run_id == w.valkey.run_id:
            w.failed_at_ms = w.now
        w.valkey.fail_over()
        self._tell("Valkey fails over")

    def _crash(self, process: Process) -> None:
        process.steps.close()
        self._tell(*process.name, "CRASHES")
        if process.is_change:
            if self.choose(2) and process.name[0] != "mute":  # Half a mute must be retried: see its rule.
                self.w.given_up = True
            else:
                self._retries.append(Process(process.name, process.start, is_change=True))

    # What is due, whoever crashed: read off the durable state

    def _due(self) -> list[Process]:
        w = self.w
        found = [self._process("relay" if self._relays(row) else "sweep", tweet) for tweet, row in self._unpublished()]
        found += [self._task("deliver", position, w.events.generation) for position in w.events.waiting()]
        for position in w.tasks.waiting():
            action = "drain_task" if is_drain(w.tasks.records[position]) else "bucket_task"
            found.append(self._task(action, position, w.tasks.generation))
        found += [self._process("publish_drain", *at) for at, drain in w.graph.drains.items() if not drain.published]
        if w.handled_run_id != w.valkey.run_id:
            found.append(self._process("republish" if w.log_in_valkey else "replay"))
        found += self._retries
        under_way = {process.name for process in self._running}
        return [process for process in found if process.name not in under_way]

    def _relays(self, row: protocol.OutboxRow) -> bool:
        return row.done or not self.w.rules.relay_waits_for_writes

    def _unpublished(self) -> list[tuple[int, protocol.OutboxRow]]:
        return [(tweet, row) for tweet, row in self.w.outbox.items() if not row.published]

    def _task(self, action: str, position: int, generation: int) -> Process:
        """Its name tells whether it was taken before or after a rewind."""
        process = self._process(action, position)
        process.name = (action, position, generation)
        return process

    def _work(self) -> None:
        """All that is due, one after the other."""
        for _ in range(WORK_MAX):
            due = self._due()
            if not due:
                return
            self._to_end(due[0])
        raise AssertionError("the work doesn't end")

    # The end

    def _finish(self) -> None:
        """What runs ends, oldest first; then all that is due is done."""
        while self._running:
            self._to_end(self._running.pop())
        self._work()

    def _judge(self) -> None:
        """Nothing is in flight, and 2 s passed: every walk is exact. So it is when lists were made and covered."""
        w = self.w
        w.pass_time(61_000 if w.given_up else 2_000)
        self._judge_walks()
        w.pass_time(31_000)
        self._hear()
        for user in w.users:
            self._now("warm", user)
            self._now("warm author", user)
        self._judge_walks()

    def _judge_walks(self) -> None:
        for viewer in self.w.users:
            model = self._model(viewer)
            for at, reader in enumerate(self.w.readers):
                walk = self._walk(at, viewer)
                if walk != model:
                    raise Failure(f"reader {at} gives {viewer} the walk {walk}, not {model}")
                assert reader.contexts

    def _model(self, viewer: int) -> list[int]:
        """Filter all tweets, sort by id."""
        near = {viewer, *(user for user, _ in self.w.graph.followees(viewer))}
        near -= {user for user in self.w.users if (viewer, user) in self.w.graph.mutes}
        return sorted((t for t, user in self.w.tweets.author_of.items() if user in near), reverse=True)

    def _walk(self, at: int, viewer: int) -> list[int]:
        steps = protocol.home_ids(self.w, self.w.readers[at], viewer)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                context, ids = end.value
                return protocol.visible(self.w, context, ids)


def fails(rules: Rules, drawn: Choices) -> tuple[str, list[int]]:
    """What goes wrong in a run ("": nothing), and the choices that led there."""
    try:
        Run(rules, drawn).go()
    except Failure as failure:
        return str(failure), drawn.taken
    return "", drawn.taken


def story(rules: Rules, choices: Sequence[int]) -> list[str]:
    """The run of a schedule in words, and how it ends."""
    run = Run(rules, Choices(replayed=choices), tells=True)
    try:
        run.go()
    except Failure as failure:
        return [*run.story, f"FAILS: {failure}"]
    return [*run.story, "passes"]
