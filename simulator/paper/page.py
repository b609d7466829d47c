"""PURE. The page of results: prose by hand, and between a pair of marks each section as it was computed.

<!-- begin traces -->
...
<!-- end traces -->
"""

from collections.abc import Sequence

from simulator.paper.section import Section

PICTURES = "paper-results"
"""The directory of pictures and tables, beside the page."""


def filled(page: str, sections: Sequence[Section], note: str) -> str:
    """The page with its marked parts replaced; sections without marks are appended. `note` stands above the first line of each part."""
    for section in sections:
        begin, end = f"<!-- begin {section.name} -->", f"<!-- end {section.name} -->"
        body = f"{begin}\n*{note}*\n\n{section.markdown(PICTURES)}\n{end}"
        before, found, rest = page.partition(begin)
        if not found:
            page = f"{page.rstrip()}\n\n{body}\n"
            continue
        _, found, after = rest.partition(end)
        page = before + body + (after if found else "\n")
    return page


def empty_page() -> str:
    """What there is before the first run."""
    return "# The paper's evaluation, run anew\n"
