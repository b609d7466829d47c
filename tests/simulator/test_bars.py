import xml.etree.ElementTree as ElementTree

from simulator.bars import Bar, bars

SVG = "{http://www.w3.org/2000/svg}"


def test_bars_are_to_one_scale_and_names_are_escaped() -> None:
    drawn = ElementTree.fromstring(bars("A < B", [Bar("ours & others", 1.0, "1 s", ours=True), Bar("theirs", 4.0, "4 s")]))
    lengths = [int(rect.attrib["width"]) for rect in drawn.findall(f"{SVG}rect") if rect.attrib["width"] != "100%"]
    assert lengths[1] == 4 * lengths[0]
    texts = [text.text for text in drawn.findall(f"{SVG}text")]
    assert texts == ["A < B", "ours & others", "1 s", "theirs", "4 s"]


def test_nothing_to_show_is_still_a_picture() -> None:
    assert ElementTree.fromstring(bars("empty", [Bar("zero", 0.0, "0")])).tag == f"{SVG}svg"
