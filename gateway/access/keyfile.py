"""The file of API keys: read when it changes, and changed by `midstream keys`."""

import asyncio
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from gateway.access.keys import BadKeys, KeyTable, read_keys, write_keys

log = logging.getLogger("midstream.gateway.keys")

_MODE = 0o600


class KeyFile:
    """The keys in force. A change is seen within `poll_s`; a file that cannot be used is logged, and the last good one stays in force."""

    def __init__(self, path: Path, poll_s: float) -> None:
        self._path = path
        self._poll_s = poll_s
        self._seen: tuple[int, ...] | None = None
        self.table = KeyTable(())

    def open(self) -> None:
        """The first reading. Raises BadKeys if it cannot be used: then there is no last good one."""
        self._seen = _mark(self._path)
        try:
            self.table = read_keys(self._path.read_text())
        except OSError as error:
            raise BadKeys(f"the file of API keys cannot be read: {error}") from error

    async def keep(self) -> None:
        """Look, for ever."""
        while True:
            await asyncio.sleep(self._poll_s)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Read the file if it has changed since it was last looked at."""
        mark = _mark(self._path)
        if mark == self._seen:
            return
        self._seen = mark
        try:
            self.table = read_keys(self._path.read_text())
            log.info("API keys were read again: %d", len(self.table.keys))
        except (OSError, BadKeys) as error:
            log.error("the file of API keys cannot be used, the last good one stays in force: %s", error)


def read_key_file(path: Path) -> KeyTable:
    """The keys in a file; none if there is no file. Raises BadKeys, OSError."""
    return read_keys(path.read_text()) if path.exists() else KeyTable(())


def change_key_file(path: Path, change: Callable[[KeyTable], KeyTable]) -> None:
    """Replace the file by one with the keys changed, at once, for its owner's eyes only. Two changes at a time wait for each other.

    Raises BadKeys, OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = write_keys(change(read_key_file(path)))
        handle, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                os.fchmod(handle, _MODE)
                file.write(text)
                file.flush()
                os.fsync(handle)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def _mark(path: Path) -> tuple[int, ...] | None:
    """What changes when the file does."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
