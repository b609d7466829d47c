"""How often a gateway looks for garbage in cycles."""

import gc


def look_seldom() -> None:
    """What is there now stays; and of requests nothing is a cycle, so that looking for cycles, which stops everybody, may be seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
