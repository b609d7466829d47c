"""PURE. Reads chosen samples out of Prometheus' text format. Lines of other families cost one look at their beginning."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$")
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: a value and its labels."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(text: str, names: tuple[str, ...]) -> Iterator[Sample]:
    """The samples of exactly these names. Lines that cannot be read are passed over: a figure that is missing is unknown."""
    for line in text.splitlines():
        if line.startswith(names):
            match = _SAMPLE.match(line)
            if match is not None and match[1] in names:
                try:
                    value = float(match[3])
                except ValueError:
                    continue
                yield Sample(match[1], _labels(match[2] or ""), value)


def _labels(text: str) -> dict[str, str]:
    return {name: _ESCAPED.sub(_unescaped, value) for name, value in _LABEL.findall(text)}


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
