"""Ends process groups whose supervisor was killed. Reads lines from standard input: `+PGID` to know a group, `-PGID` to forget it.

End of input means that the supervisor is gone: the groups still known get SIGTERM, some seconds, then SIGKILL. Standard library only.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

GRACE_S = 5.0


def known_groups(lines: Iterable[str]) -> set[int]:
    """The groups left when the input has ended."""
    groups: set[int] = set()
    for line in lines:
        if line.startswith("+"):
            groups.add(int(line[1:]))
        elif line.startswith("-"):
            groups.discard(int(line[1:]))
    return groups


def send(groups: set[int], number: signal.Signals) -> set[int]:
    """Signal every group; answers those that exist."""
    alive = set()
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
            alive.add(group)
    return alive


def main() -> None:
    """Wait for the end of input, then end what is left."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups = send(known_groups(sys.stdin), signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while groups and time.monotonic() < deadline:
        time.sleep(0.05)
        groups = {group for group in groups if exists(group)}
    send(groups, signal.SIGKILL)


def exists(group: int) -> bool:
    """Whether a process of the group is there."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
