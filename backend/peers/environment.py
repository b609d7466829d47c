"""Settings out of the environment, for whoever starts a process: what is malformed is named, and nothing starts."""

import re
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsError

S = TypeVar("S", bound=BaseSettings)

MALFORMED = 2
"""The exit status, as for malformed flags."""


def read_or_exit(kind: type[S], **given: Any) -> S:
    """These settings; `given` wins over the environment. What is malformed goes to stderr, a line each, and SystemExit is raised.

    Values are shown only where a check of ours quotes its own: pydantic's way to print each of them would print secrets.
    """
    try:
        return kind(**given)
    except ValidationError as error:
        for complaint in complaints(kind, error):
            print(f"error: {complaint}", file=sys.stderr)  # noqa: T201  # before there is a log
    except SettingsError as error:
        print(f"error: {_unparsed(kind, error)}", file=sys.stderr)  # noqa: T201
    raise SystemExit(MALFORMED)


def complaints(kind: type[BaseSettings], error: ValidationError) -> Iterator[str]:
    """What is wrong with each variable, under its name; with several together, under none."""
    for each in error.errors():
        said = each["msg"].removeprefix("Value error, ")
        place = each["loc"]
        if not place:
            yield said
            continue
        inner = "".join(f", {part}" for part in place[1:])
        yield f"{variable(kind, str(place[0]))}{inner}: {said[:1].lower()}{said[1:]}"


def variable(kind: type[BaseSettings], field: str) -> str:
    """The environment variable of that field, which may go by its alias."""
    known = kind.model_fields.get(field)
    if known is None:
        return field
    alias = known.validation_alias
    return alias if isinstance(alias, str) else f"{kind.model_config.get('env_prefix', '')}{field}".upper()


def _unparsed(kind: type[BaseSettings], error: SettingsError) -> str:
    """pydantic-settings names the field in its message alone."""
    named = re.search(r'field "(\w+)"', str(error))
    return f"{variable(kind, named[1])} is not JSON: {error.__cause__}" if named else str(error)
