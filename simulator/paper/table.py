"""PURE. A table of figures, for people (Markdown) and for programs (CSV, JSON)."""

import csv
import io
from dataclasses import dataclass
from typing import TypeAlias

Cell: TypeAlias = str | float | int | None


@dataclass(frozen=True, slots=True)
class Table:
    """`name` is its file's. A cell that is None was not measured, or says nothing."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def markdown(self) -> str:
        """With the title above it."""
        lines = [f"**{self.title}**", "", _row(self.header), _row(("---",) * len(self.header))]
        lines += [_row(tuple(show(cell) for cell in row)) for row in self.rows]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Figures in full."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows(["" if cell is None else cell for cell in row] for row in self.rows)
        return out.getvalue()

    def to_json(self) -> dict[str, object]:
        """Rows as lists."""
        return {"title": self.title, "header": list(self.header), "rows": [list(row) for row in self.rows]}


def show(cell: Cell) -> str:
    """Three digits or so."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        size = abs(cell)
        return (
            f"{cell:.0f}" if size >= 100 else f"{cell:.1f}" if size >= 20 else f"{cell:.2f}" if size >= 0.1 or not cell else f"{cell:.3f}"
        )
    return str(cell)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
