"""Time that stands until a test moves it."""


class ManualClock:
    def __init__(self, now_ms: int = 1_790_000_000_000) -> None:
        self._ms = now_ms

    def now_ms(self) -> int:
        return self._ms

    def monotonic(self) -> float:
        return self._ms / 1_000

    def advance(self, ms: int) -> None:
        self._ms += ms


class SteppingClock(ManualClock):
    """Its wall clock may be set, as an operator or NTP would; the monotonic one goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.offset_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.offset_ms
