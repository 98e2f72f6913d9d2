"""One run: a small world, processes interleaved by choices, crashes; then everything is finished, and walks are judged.

A schedule is the list of choices, each the number of an option, 0 the plainest: replayed on the same code it gives the
same run. `story` tells it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mesh.timelines.port import author, home
from tests.sim import protocol
from tests.sim.rules import Rules
from tests.sim.world import Choices, Failure, Mode, Steps, World, is_drain

ACTIONS: tuple[str, ...] = (
    "finish",
    "work",
    "all_work",
    "post",
    "read",
    "warm",
    "follow",
    "unfollow",
    "hear",
    "time",
    "mode",
    "mute",
    "evict",
)
ACTIONS += ("warm_author", "evict_author", "failover", "crash")
WEIGHTS = {
    "work": (3, 6),
    "all_work": (0, 0.3, 1),
    "finish": (0, 0.3, 1),
    "time": (0.3, 1),
    "mode": (0, 0.3, 1),
    "hear": (0.3, 1),
    "evict": (0, 0.3, 1),
}
WEIGHTS |= {"evict_author": (0, 0, 0.3), "failover": (0, 0, 0, 0.5), "crash": (0, 0, 1)}
"""What an action's weight is drawn from, for each seed anew, so that each seed leaves something out."""
OTHER_WEIGHTS = (0, 0, 1, 1, 3)
PACES = (0.1, 2, 8)
VIEWER_WEIGHTS = (5, 2, 1, 1)
AUTHOR_WEIGHTS = (1, 5, 2, 2)
DENSITIES = (0.2, 1, 5)
ALWAYS = {"finish", "work", "all_work"}
STEPS = (10, 20, 40)
RUNNING_MAX = 6
WORK_MAX = 1_000
JUMPS_MS = (2_000, 6_000, 16_000, 21_000, 31_000)
PAGE_SIZES = (100, 1, 2)
CHANGES = {"follow", "unfollow", "mute"}
"""A client waits for their reply, and may retry."""

Name = tuple[str | int, ...]
"""A function of `protocol.py` and its arguments."""


@dataclass(slots=True, eq=False)
class Process:
    """`pace`: how readily a seed goes on with it, for a while."""

    name: Name
    steps: Steps
    pace: float = 1.0


class Run:
    """See the module."""

    def __init__(self, rules: Rules, choices: Choices, *, tells: bool = False) -> None:
        self.choose = choices
        self.w = World(rules, choices)
        self.story: list[str] = []
        self._tells = tells
        self._running: list[Process] = []
        """The one that ran last comes first."""
        self._retries: list[Name] = []

    def go(self) -> None:
        """Raises Failure."""
        self._furnish()
        work_first = self.choose(2) == 1
        self._interleave()
        self.choose.over = True
        if work_first:  # What runs is slower than all the rest.
            self._work()
        while self._running:
            self._finish(self._running.pop())
        self._work()
        self._judge()

    def _tell(self, *words: object) -> None:
        if self._tells:
            self.story.append(" ".join(map(str, words)))

    # The beginning: some follow each other, have posted, have a list, are pulled.

    def _furnish(self) -> None:
        w, choose = self.w, self.choose
        users = ", ".join(map(str, w.users))
        self._tell(f"users {users}; lists of {w.lists.cap}; log in {'Valkey' if w.log_in_valkey else 'Kafka'}")
        density = choose.random.choice(DENSITIES) if choose.random else 1
        pulls = 9 if "pulled" in choose.focus else 0.5
        for viewer in w.users:
            for user in w.users:
                if user != viewer and not choose(2, (density, 1)):
                    self._do("follow", viewer, user)
        for user in w.users:
            for _ in range(choose(4)):
                self._do("post", user)
        self._work()
        for user in w.users:
            if not choose(2, (2, 1)):
                self._do("warm", user)
            if choose(2, (1, pulls)):
                self._do("warm_author", user)
            if choose(2, (1, pulls)):
                self._move(user)
        self._let_readers_know()
        for user in w.users:
            if w.graph.modes[user].mode is Mode.PULL and choose(2):
                self._do("post", user)
        self._work()
        self._let_readers_know()

    def _let_readers_know(self) -> None:
        self.w.pass_time(protocol.PULL_AGE_MS)
        for which in range(len(self.w.readers) + 1):
            self._hear(which)

    def _do(self, *name: str | int) -> None:
        self._finish(self._process(name))

    def _process(self, name: Name) -> Process:
        action, *arguments = name
        return Process(name, getattr(protocol, str(action))(self.w, *arguments))

    def _finish(self, process: Process) -> None:
        for did in process.steps:
            self._tell(*process.name, "→", did)
        self._tell(*process.name, "ends")

    def _work(self) -> None:
        """All that is due, one after the other."""
        for _ in range(WORK_MAX):
            due = self._due()
            if not due:
                return
            self._take_up(due[0])
            self._do(*due[0])
        raise AssertionError("the work doesn't end")

    # The middle

    def _interleave(self) -> None:
        weights = self._draw_weights()
        steps = STEPS[self.choose(len(STEPS))]
        while self.choose.left and steps:
            steps -= 1
            running = len(self._running)
            option = self.choose(running + len(ACTIONS), [process.pace for process in self._running] + weights)
            if option < running:
                self._step(self._running.pop(option))
            else:
                self._act(ACTIONS[option - running])

    def _draw_weights(self) -> list[float]:
        random, focus = self.choose.random, self.choose.focus
        drawn = [WEIGHTS.get(action, OTHER_WEIGHTS) for action in ACTIONS]
        if random is None:
            return []
        if not focus:
            return [random.choice(weights) for weights in drawn]
        return [
            random.choice([weight for weight in weights if weight]) if action in focus or action in ALWAYS else 0
            for action, weights in zip(ACTIONS, drawn, strict=True)
        ]

    def _step(self, process: Process) -> None:
        did = next(process.steps, None)
        if did is None:
            self._tell(*process.name, "ends")
            return
        self._tell(*process.name, "→", did)
        self._running.insert(0, process)
        random = self.choose.random
        if did in self.choose.focus:
            process.pace = min(PACES)
        elif random and random.random() < 0.25:
            process.pace = random.choice(PACES)

    def _act(self, action: str) -> None:
        w, choose = self.w, self.choose
        match action:
            case "work":
                if due := self._due():
                    self._start(due[choose(len(due))])
            case "all_work":
                self._work()
            case "finish" if self._running:
                self._finish(self._running.pop(choose(len(self._running))))
            case "post" | "warm_author":
                self._start((action, self._author()))
            case "warm":
                self._start((action, self._viewer()))
            case "read":
                self._start((action, choose(len(w.readers)), self._viewer(), PAGE_SIZES[choose(len(PAGE_SIZES))]))
            case "follow" | "unfollow" | "mute":
                viewer, user = self._viewer(), self._author()
                if viewer != user:
                    self._start((action, viewer, user, choose(2)) if action == "mute" else (action, viewer, user))
            case "mode":
                self._move(self._author())
            case "evict" | "evict_author":
                key = home(self._viewer()) if action == "evict" else author(self._author())
                w.lists.drop(key)
                self._tell(action, key.owner)
            case "hear":
                self._hear(choose(len(w.readers) + 1))
            case "time":
                jump = JUMPS_MS[choose(len(JUMPS_MS))]
                w.pass_time(jump)
                self._tell(jump // 1_000, "s pass")
            case "failover":
                self._fail_over()
            case "crash" if self._running:
                self._crash(self._running.pop(choose(len(self._running))))

    def _viewer(self) -> int:
        """Mostly the same: what goes wrong, goes wrong for one."""
        return self.w.users[self.choose(len(self.w.users), VIEWER_WEIGHTS[: len(self.w.users)])]

    def _author(self) -> int:
        return self.w.users[self.choose(len(self.w.users), AUTHOR_WEIGHTS[: len(self.w.users)])]

    def _start(self, name: Name) -> None:
        if len(self._running) == RUNNING_MAX:
            return
        self._take_up(name)
        if self.choose(2, (1, 3)):
            self._step(self._process(name))
        else:
            self._do(*name)

    def _take_up(self, name: Name) -> None:
        if name in self._retries:
            self._retries.remove(name)

    def _move(self, user: int) -> None:
        """PUSH → PULL → DRAIN, and DRAIN → PULL. DRAIN → PUSH is up to the drain tasks."""
        is_pulled = self.w.graph.modes[user].mode is Mode.PULL
        self.w.graph.set_mode(user, Mode.DRAIN if is_pulled else Mode.PULL)
        self._tell("author", user, "→", self.w.graph.modes[user].mode.name)

    def _hear(self, which: int) -> None:
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
        if process.name[0] in CHANGES:
            if self.choose(2) and process.name[0] != "mute":  # Half a mute must be retried: see its rule.
                self.w.given_up = True
            else:
                self._retries.append(process.name)

    def _due(self) -> list[Name]:
        """What is to be done, whoever crashed: it is read off what is durable."""
        w = self.w
        due: list[Name] = []
        for tweet, row in w.outbox.items():
            if not row.published:
                due.append(("relay" if row.done or not w.rules.relay_waits_for_writes else "sweep", tweet))
        due += [("deliver", position, w.events.generation) for position in w.events.waiting()]
        for position in w.tasks.waiting():
            action = "drain_task" if is_drain(w.tasks.records[position]) else "bucket_task"
            due.append((action, position, w.tasks.generation))
        due += [("publish_drain", *at) for at, drain in w.graph.drains.items() if not drain.published]
        if w.handled_run_id != w.valkey.run_id:
            due.append(("republish" if w.log_in_valkey else "replay",))
        due += self._retries
        under_way = {process.name for process in self._running}
        return [name for name in due if name not in under_way]

    # The end

    def _judge(self) -> None:
        """Nothing is in flight, and 2 s passed: every walk is exact. So it is when lists were made and covered."""
        w = self.w
        w.pass_time(61_000 if w.given_up else 2_000)
        self._judge_walks()
        w.pass_time(31_000)
        self._let_readers_know()
        for user in w.users:
            self._do("warm", user)
            self._do("warm_author", user)
        self._judge_walks()

    def _judge_walks(self) -> None:
        for viewer in self.w.users:
            model = self._model(viewer)
            for at in range(len(self.w.readers)):
                walk = self._walk(at, viewer)
                if walk != model:
                    raise Failure(f"reader {at} gives {viewer} the walk {walk}, not {model}")

    def _model(self, viewer: int) -> list[int]:
        """Filter all tweets, sort by id."""
        near = {viewer, *(user for user, _ in self.w.graph.followees(viewer))}
        near -= {user for user in self.w.users if (viewer, user) in self.w.graph.mutes}
        return sorted((tweet for tweet, user in self.w.tweets.author_of.items() if user in near), reverse=True)

    def _walk(self, at: int, viewer: int) -> list[int]:
        steps = protocol.home_ids(self.w, self.w.readers[at], viewer)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                context, ids = end.value
                return protocol.visible(self.w, context, ids)


def fails(rules: Rules, choices: Choices) -> str:
    """What goes wrong in a run; "": nothing."""
    try:
        Run(rules, choices).go()
    except Failure as failure:
        return str(failure)
    return ""


def story(rules: Rules, choices: Sequence[int]) -> list[str]:
    """The run of a schedule in words, and how it ends."""
    run = Run(rules, Choices(replayed=choices), tells=True)
    try:
        run.go()
    except Failure as failure:
        return [*run.story, f"FAILS: {failure}"]
    return [*run.story, "passes"]
