from simulator.paper.page import filled
from simulator.paper.section import Section
from simulator.paper.table import Table, show


def section(value: float, picture: str = "<svg/>") -> Section:
    return Section("traces", (Table("t", "Title", ("a", "b"), (("x", value), ("y", None))),), picture, "what it shows")


def test_prose_stays_and_figures_are_replaced() -> None:
    page = "# Title\n\nWhy.\n\n<!-- begin traces -->\nold\n<!-- end traces -->\n\nWhat falls short.\n"
    new = filled(page, [section(1.5)], "by this command")
    assert new.startswith("# Title\n\nWhy.\n\n<!-- begin traces -->\n*by this command*\n")
    assert new.endswith("<!-- end traces -->\n\nWhat falls short.\n")
    assert "old" not in new
    assert "![what it shows](paper-results/traces.svg)" in new
    assert "| x | 1.50 |\n| y | – |" in new
    assert filled(new, [section(1.5)], "by this command") == new


def test_a_section_without_a_place_goes_to_the_end() -> None:
    new = filled("# Title\n", [section(1.5, "")], "n")
    assert new.startswith("# Title\n\n<!-- begin traces -->")
    assert "![" not in new


def test_figures_have_about_three_digits() -> None:
    assert [show(each) for each in (0.0123, 1.234, 23.45, 1234.5, 0.0, -1.5, 7, "word", None)] == [
        *("0.012", "1.23", "23.4", "1234", "0.00", "-1.50", "7", "word", "–")
    ]


def test_csv_has_them_in_full() -> None:
    table = Table("t", "Title", ("a", "b"), (("x", 1.23456789), ("y", None)))
    assert table.csv() == "a,b\nx,1.23456789\ny,\n"
    assert table.to_json()["rows"] == [["x", 1.23456789], ["y", None]]
