"""PURE. Line pictures as SVG: panels in a grid, each with its own axes, and one legend.

Nothing here knows what is drawn. A value axis is logarithmic where the panel says so; zeros then lie on its lower edge.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 210, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 24, 30
_LEGEND = 30
COLOURS = ("#8c8c8c", "#c9781f", "#2f6f9f", "#a3262a", "#4c8c4a", "#6b4fa0")


@dataclass(frozen=True, slots=True)
class Line:
    """One series: its points, by x."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    x_title: str
    lines: tuple[Line, ...]
    log: bool = False


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    log: bool

    def place(self, value: float) -> float:
        """From 0 (low) to 1 (high)."""
        if self.log:
            return (log10(max(value, self.low)) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            powers = [10.0**power for power in range(round(log10(self.low)), round(log10(self.high)) + 1)]
            return powers[:: max(1, len(powers) // 4)]
        return [self.low, (self.low + self.high) / 2, self.high]


def grid(title: str, panels: Sequence[Panel], columns: int) -> str:
    """The picture: rows of `columns` panels."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    width, height = columns * WIDTH, ceil(len(panels) / columns) * HEIGHT + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="10">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(colours),
    ]
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        parts += _panel(panel, column * WIDTH, _LEGEND + row * HEIGHT, colours)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(colours: dict[str, str]) -> list[str]:
    parts, x = [], 10.0
    for name, colour in colours.items():
        parts.append(f'<line x1="{x:g}" y1="14" x2="{x + 18:g}" y2="14" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 23:g}" y="18" font-size="11">{escape(name)}</text>')
        x += 40 + 6.5 * len(name)
    return parts


def _panel(panel: Panel, left: float, top: float, colours: dict[str, str]) -> list[str]:
    xs = [x for line in panel.lines for x, _ in line.points]
    ys = [y for line in panel.lines for _, y in line.points]
    x0, x1, y0, y1 = left + _LEFT, left + WIDTH - _RIGHT, top + HEIGHT - _BOTTOM, top + _TOP
    parts = [
        f'<text x="{(x0 + x1) / 2:g}" y="{top + 14:g}" text-anchor="middle" font-weight="bold">{escape(panel.title)}</text>',
        f'<text x="{(x0 + x1) / 2:g}" y="{y0 + 25:g}" text-anchor="middle" fill="#555">{escape(panel.x_title)}</text>',
        f'<path d="M{x0:g} {y1:g}V{y0:g}H{x1:g}" fill="none" stroke="#555"/>',
    ]
    if not xs:
        return parts
    across = _Axis(min(xs), max(xs), False) if max(xs) > min(xs) else _Axis(min(xs) - 1, max(xs) + 1, False)
    upward = _value_axis(ys, panel.log)

    def at(x: float, y: float) -> tuple[float, float]:
        return x0 + (x1 - x0) * across.place(x), y0 - (y0 - y1) * upward.place(y)

    for value in upward.ticks():
        y = at(across.low, value)[1]
        parts.append(f'<path d="M{x0:g} {y:.1f}H{x1:g}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x0 - 4:g}" y="{y + 3:.1f}" text-anchor="end" fill="#555">{_short(value)}</text>')
    parts += [
        f'<text x="{at(value, upward.low)[0]:.1f}" y="{y0 + 12:g}" text-anchor="middle" fill="#555">{_short(value)}</text>'
        for value in sorted({min(xs), max(xs)})
    ]
    for line in panel.lines:
        places = [at(x, y) for x, y in line.points]
        colour = colours[line.name]
        if len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(places) <= 12:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"/>' for x, y in places]
    return parts


def _value_axis(values: Sequence[float], log: bool) -> _Axis:
    top = max(values)
    positive = [value for value in values if value > 0]
    if log and positive:
        low, high = floor(log10(min(positive))), ceil(log10(max(positive)))
        return _Axis(10.0**low, 10.0 ** max(high, low + 1), True)
    return _Axis(0.0, top * 1.08 if top > 0 else 1.0, False)


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"
