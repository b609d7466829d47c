"""PURE. Horizontal bars as SVG, for what the simulator and the benchmarks report."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

HEIGHT, LEFT, WIDTH, TOP = 34, 190, 420, 44
OURS, OTHERS = "#2f6f9f", "#b0b0b0"


@dataclass(frozen=True, slots=True)
class Bar:
    """One row. `ours` sets it off from what it is compared with."""

    name: str
    value: float
    label: str
    ours: bool = False


def bars(title: str, rows: Sequence[Bar]) -> str:
    """One bar a row, all from zero and to one scale."""
    longest = max((row.value for row in rows), default=0.0) or 1.0
    drawn = []
    for number, row in enumerate(rows):
        y, length = TOP + number * HEIGHT, max(1, round(WIDTH * row.value / longest))
        drawn.append(
            f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end">{escape(row.name)}</text>'
            f'<rect x="{LEFT}" y="{y}" width="{length}" height="24" fill="{OURS if row.ours else OTHERS}"/>'
            f'<text x="{LEFT + length + 6}" y="{y + 17}">{escape(row.label)}</text>'
        )
    size = f'width="{LEFT + WIDTH + 110}" height="{TOP + 10 + len(rows) * HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">'
    paper = '<rect width="100%" height="100%" fill="white"/>'
    shown = f'<title>{escape(title)}</title>{paper}<text x="12" y="24" font-size="15">{escape(title)}</text>'
    return "\n".join([head, shown, *drawn, "</svg>"]) + "\n"
