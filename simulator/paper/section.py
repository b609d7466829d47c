"""PURE. One part of the page of results: what one experiment found, as tables and a picture."""

from dataclasses import dataclass

from simulator.paper.table import Table


@dataclass(frozen=True, slots=True)
class Section:
    """`picture` is SVG; empty if there is none. `alt` says what it shows."""

    name: str
    tables: tuple[Table, ...]
    picture: str = ""
    alt: str = ""

    def markdown(self, pictures: str) -> str:
        """The tables, and the picture's place: `pictures` is where it lies."""
        shown = [f"![{self.alt}]({pictures}/{self.name}.svg)\n"] if self.picture else []
        return "\n".join([*shown, *(table.markdown() for table in self.tables)])
