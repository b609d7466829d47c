from xml.etree import ElementTree

from simulator.paper.chart import Line, Panel, grid

RISING = Line("a & b", ((1.0, 0.01), (2.0, 10.0)))


def places(picture: str) -> list[list[tuple[float, float]]]:
    lines = [each.attrib["points"] for each in ElementTree.fromstring(picture).iter() if each.tag.endswith("polyline")]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line.split())] for line in lines]


def test_it_is_xml_with_every_line_and_a_legend() -> None:
    picture = grid("two <panels>", [Panel("p", "x", (RISING, Line("c", ((1.0, 1.0), (2.0, 2.0))))), Panel("q", "x", (RISING,))], 2)
    assert len(places(picture)) == 3
    texts = [each.text for each in ElementTree.fromstring(picture).iter() if each.text]
    assert texts.count("a & b") == 1
    assert "two <panels>" in texts


def test_more_is_higher_and_further_right() -> None:
    for log in (False, True):
        ((low, high),) = places(grid("t", [Panel("p", "x", (RISING,), log)], 1))
        assert low[0] < high[0]
        assert low[1] > high[1]


def test_zeros_lie_on_the_edge_of_a_logarithmic_axis() -> None:
    (line,) = places(grid("t", [Panel("p", "x", (Line("z", ((1.0, 0.0), (2.0, 1.0), (3.0, 0.1))),), True)], 1))
    assert line[0][1] == line[2][1]


def test_one_point_no_point_and_all_zeros_can_be_drawn() -> None:
    for points in (((1.0, 2.0),), (), ((1.0, 0.0), (2.0, 0.0))):
        ElementTree.fromstring(grid("t", [Panel("p", "x", (Line("a", points),), True), Panel("p", "x", (Line("a", points),))], 1))
