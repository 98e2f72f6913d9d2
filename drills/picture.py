"""Curves over time, as an SVG file: panels one below the other, on one axis of seconds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_WIDTH, _PANEL, _GAP = 900, 150, 46
_LEFT, _RIGHT, _TOP = 80, 20, 40
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700")


@dataclass(frozen=True, slots=True)
class Curve:
    """(seconds, value) from left to right."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves with one scale, from 0 to their greatest value."""

    title: str
    curves: Sequence[Curve]


def write(path: Path, title: str, panels: Sequence[Panel], marks: Mapping[str, float]) -> None:
    """`marks`: moments to be marked, seconds by name. At most 4 curves to a panel."""
    path.write_text(svg(title, panels, marks), encoding="utf-8")


def svg(title: str, panels: Sequence[Panel], marks: Mapping[str, float]) -> str:
    """See `write`."""
    moments = [seconds for panel in panels for curve in panel.curves for seconds, _ in curve.points]
    x = _Axis(_nice(max([*moments, *marks.values(), 1.0])), _LEFT, _WIDTH - _RIGHT)
    height = _TOP + len(panels) * (_PANEL + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif"'
        f' font-size="11"><rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_LEFT, 20, title, size=14),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, x, _TOP + number * (_PANEL + _GAP) + 20, marks)
    return "\n".join([*parts, "</svg>\n"])


@dataclass(frozen=True, slots=True)
class _Axis:
    """From 0 at `start` to `greatest` at `end`, px."""

    greatest: float
    start: int
    end: int

    def at(self, value: float) -> str:
        return f"{self.start + (self.end - self.start) * value / self.greatest:.1f}"

    def ticks(self, count: int) -> list[float]:
        return [self.greatest * number / count for number in range(count + 1)]


def _nice(greatest: float) -> float:
    """The next number up of which a person would make an axis."""
    power = 10.0 ** math.floor(math.log10(greatest))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= greatest)


def _panel(panel: Panel, x: _Axis, top: int, marks: Mapping[str, float]) -> list[str]:
    bottom = top + _PANEL
    greatest = max((value for curve in panel.curves for _, value in curve.points), default=0.0)
    y = _Axis(_nice(greatest) if greatest > 0 else 1.0, bottom, top)
    parts = [_text(_LEFT, top - 6, panel.title, weight="bold")]
    for value in y.ticks(2):
        parts += [_line(_LEFT, y.at(value), _WIDTH - _RIGHT, y.at(value), "#ddd")]
        parts += [
            _text(_LEFT - 6, float(y.at(value)) + 4, f"{value:,.4g}" if value < 1_000 else f"{value:,.0f}", "end")
        ]
    for value in x.ticks(6 if x.greatest % 6 == 0 else 5):
        parts += [_line(x.at(value), bottom, x.at(value), bottom + 4, "#888")]
        parts += [_text(float(x.at(value)), bottom + 16, f"{value:,.4g} s", "middle")]
    for name, seconds in marks.items():
        parts += [_line(x.at(seconds), top, x.at(seconds), bottom, "#888", dashes="4 3")]
        parts += [_text(float(x.at(seconds)) + 3, top + 10, name, colour="#666")]
    right = _WIDTH - _RIGHT
    for colour, curve in zip(_COLOURS, panel.curves, strict=False):
        points = " ".join(f"{x.at(seconds)},{y.at(value)}" for seconds, value in curve.points)
        parts += [f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>']
    for place, (colour, curve) in enumerate(zip(_COLOURS, panel.curves, strict=False)):
        parts += [_text(right - 150 * (len(panel.curves) - 1 - place), top - 6, curve.name, "end", colour=colour)]
    return parts


def _line(x1: object, y1: object, x2: object, y2: object, colour: str, dashes: str = "none") -> str:
    place = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
    return f'<line {place} stroke="{colour}" stroke-dasharray="{dashes}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    *,
    size: int = 11,
    weight: str = "normal",
    colour: str = "#222",
) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
