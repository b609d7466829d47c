from simulator.loop import Loop


def test_events_happen_in_time_and_ties_in_the_order_of_planning() -> None:
    loop, seen = Loop(), list[tuple[float, str]]()

    def note(name: str) -> None:
        seen.append((loop.now_s, name))

    def second() -> None:
        note("second")
        loop.after(0.5, lambda: note("planned"))

    loop.at(2.0, lambda: note("late"))
    loop.at(1.0, lambda: note("first"))
    loop.at(1.0, second)
    loop.at(1.2, lambda: loop.at(0.1, lambda: note("overdue")))
    loop.run(lambda: False)
    assert seen == [(1.0, "first"), (1.0, "second"), (1.2, "overdue"), (1.5, "planned"), (2.0, "late")]


def test_it_stops_when_it_is_done() -> None:
    loop = Loop()
    for when_s in (1.0, 2.0, 3.0):
        loop.at(when_s, lambda: None)
    loop.run(lambda: loop.now_s >= 2.0)
    assert loop.now_s == 2.0
