"""`midstream keys`: makes, lists and removes API keys. A key is shown once, when it is made; the file has only its hash."""

import argparse
import json
import secrets
import sys
from pathlib import Path

from backend.peers.environment import read_or_exit
from gateway.access.keyfile import change_key_file, read_key_file
from gateway.access.keys import KEY_PREFIX, ApiKey, BadKeys, KeyTable, hash_of_key
from gateway.settings import GatewaySettings

KEY_BYTES = 32


def run(options: argparse.Namespace) -> int:
    """The exit status."""
    path = Path(options.file) if options.file else read_or_exit(GatewaySettings).api_keys_file
    if path is None:
        print("error: which file? Name it with --file, or set MIDSTREAM_API_KEYS_FILE", file=sys.stderr)
        return 2
    try:
        match options.action:
            case "add":
                _add(path, options)
            case "remove":
                change_key_file(path, lambda table: table.without(options.name))
                print(f"{options.name} is removed.", file=sys.stderr)
            case "list":
                print(_listed(read_key_file(path), as_json=options.json))
    except (BadKeys, OSError) as error:
        print(f"error: {path}: {error}", file=sys.stderr)
        return 1
    return 0


def _add(path: Path, options: argparse.Namespace) -> None:
    secret = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    try:
        key = ApiKey(
            name=options.name,
            sha256=hash_of_key(secret),
            models=options.model,
            highest_tier=options.highest_tier,
            requests_per_minute=options.requests_per_minute,
            tokens_per_minute=options.tokens_per_minute,
        )
    except ValueError:
        raise BadKeys("a name has 1 to 64 of A-Z a-z 0-9 . _ -") from None
    change_key_file(path, lambda table: table.with_key(key))
    print(secret)
    print("This is the key; it cannot be shown again.", file=sys.stderr)


def _listed(table: KeyTable, *, as_json: bool) -> str:
    if as_json:
        return json.dumps([key.model_dump(exclude={"sha256"}) for key in table.keys])
    rows: list[tuple[str, ...]] = [("name", "models", "highest tier", "requests/min", "tokens/min")]
    for key in table.keys:
        models = "all" if key.models is None else ",".join(key.models) or "none"
        limits = (str(limit or "-") for limit in (key.requests_per_minute, key.tokens_per_minute))
        rows.append((key.name, models, key.highest_tier or "-", *limits))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
