"""The list of keys, and its file."""

import asyncio
import json
import logging
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.cli import main
from gateway.access.keyfile import KeyFile, change_key_file, read_key_file
from gateway.access.keys import ApiKey, BadKeys, KeyTable, bearer, hash_of_key, read_keys, write_keys

ZERO, ONE = "0" * 64, "1" * 64
KEY = ApiKey(name="alice", sha256=hash_of_key("secret"), models=["m"], requests_per_minute=5)


def test_a_key_is_found_by_itself_and_by_nothing_else() -> None:
    table = read_keys(write_keys(KeyTable((KEY,))))
    assert table.find("secret") == KEY
    for other in ("", "secre", "secrets", KEY.sha256, "é\ud800"):
        assert table.find(other) is None


def test_no_key_is_in_the_file_and_no_hash_in_a_log() -> None:
    assert "secret" not in write_keys(KeyTable((KEY,)))
    assert KEY.sha256 not in repr(KEY)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"keys": [{"name": "a"}]}',
        '{"keys": [{"name": "a b", "sha256": "%s"}]}' % ("0" * 64),
        '{"keys": [{"name": "a", "sha256": "0"}]}',
        '{"keys": [{"name": "a", "sha256": "%s", "requests_per_minute": 0}]}' % ("0" * 64),
        '{"keys": [{"name": "a", "sha256": "%s", "model": ["m"]}]}' % ("0" * 64),
        f'{{"keys": [{{"name": "a", "sha256": "{ZERO}"}}, {{"name": "a", "sha256": "{ONE}"}}]}}',
        f'{{"keys": [{{"name": "a", "sha256": "{ZERO}"}}, {{"name": "b", "sha256": "{ZERO}"}}]}}',
    ],
)
def test_lists_that_cannot_be_used(text: str) -> None:
    with pytest.raises(BadKeys):
        read_keys(text)


@pytest.mark.parametrize(
    ("header", "key"), [(None, None), ("", None), ("Bearer", None), ("Basic x", None), ("Bearer x", "x"), ("bearer  x ", "x")]
)
def test_bearer(header: str | None, key: str | None) -> None:
    assert bearer(header) == key


def test_a_changed_file_is_read_again_and_a_broken_one_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.json"
    change_key_file(path, lambda table: table.with_key(KEY))
    keys = KeyFile(path, poll_s=1)
    keys.open()
    assert keys.table.find("secret") == KEY
    change_key_file(path, lambda table: table.without("alice"))
    keys.look()
    assert keys.table.find("secret") is None
    change_key_file(path, lambda table: table.with_key(KEY))
    keys.look()
    for broken in ("{", None):
        if broken is None:
            path.unlink()
        else:
            path.write_text(broken)
        with caplog.at_level(logging.ERROR):
            keys.look()
        assert "the last good one stays in force" in caplog.text
        assert keys.table.find("secret") == KEY
        caplog.clear()
        keys.look()
        assert not caplog.records, "said once"


async def test_the_file_is_watched(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"keys": []}')
    keys = KeyFile(path, poll_s=0.005)
    keys.open()
    watching = asyncio.create_task(keys.keep())
    change_key_file(path, lambda table: table.with_key(KEY))
    async with asyncio.timeout(5):
        while keys.table.find("secret") is None:
            await asyncio.sleep(0.002)
    watching.cancel()


@pytest.mark.parametrize("text", [None, "{"])
def test_there_is_no_start_without_a_good_file(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "keys.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadKeys):
        KeyFile(path, 1).open()


def test_changes_at_the_same_time_are_all_kept_and_only_the_owner_may_look(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "keys.json"

    def add(number: int) -> None:
        change_key_file(path, lambda table: table.with_key(ApiKey(name=f"k{number}", sha256=hash_of_key(str(number)))))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(24)))
    assert {key.name for key in read_key_file(path).keys} == {f"k{number}" for number in range(24)}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(one.name for one in path.parent.iterdir()) == ["keys.json", "keys.json.lock"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ("--file", str(tmp_path / "keys.json"))
    assert main(["keys", "add", "bob", "--model", "m", "--model", "n", "--highest-tier", "normal", "--tokens-per-minute", "9", *file]) == 0
    secret = capsys.readouterr().out.strip()
    assert len(secret) > 40
    key = read_key_file(tmp_path / "keys.json").find(secret)
    assert key is not None
    assert (key.name, key.models, key.highest_tier, key.requests_per_minute, key.tokens_per_minute) == (
        "bob",
        ["m", "n"],
        "normal",
        None,
        9,
    )
    assert main(["keys", "list", *file]) == 0
    _, row = capsys.readouterr().out.splitlines()
    assert row.split() == ["bob", "m,n", "normal", "-", "9"]
    assert main(["keys", "list", "--json", *file]) == 0
    assert "sha256" not in json.loads(capsys.readouterr().out)[0]
    assert main(["keys", "add", "bob", *file]) == 1
    assert main(["keys", "add", "b b", *file]) == 1
    assert main(["keys", "remove", "eve", *file]) == 1
    assert main(["keys", "remove", "bob", *file]) == 0
    assert read_key_file(tmp_path / "keys.json").keys == ()


def test_the_command_wants_to_know_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["keys", "list"]) == 2
    monkeypatch.setenv("MIDSTREAM_API_KEYS_FILE", str(tmp_path / "keys.json"))
    assert main(["keys", "list"]) == 0
    assert "MIDSTREAM_API_KEYS_FILE" in capsys.readouterr().err
