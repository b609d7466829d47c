"""PURE. Frozen dataclasses to and from JSON-able values, strictly, by their type hints.

str, int, float, bool, None, StrEnum, nested dataclasses, `tuple[X, ...]`, `tuple[X, Y]`, `X | None`; bytes travel as base64. A bool is
not an int; an int is a float. Unknown, missing and mistyped fields raise ValueError with the path of the culprit.
"""

import base64
import binascii
import dataclasses
import types
import typing
from collections.abc import Callable
from enum import StrEnum
from functools import cache

Decoder = Callable[[object], object]


def encode(value: object) -> object:
    """The JSON-able form of a dataclass or of anything it may hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: encode(getattr(value, name)) for name in _field_names(type(value))}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, StrEnum):
        return value.value
    return value


T = typing.TypeVar("T")


def decode(kind: Callable[..., T], value: object) -> T:
    """The dataclass of class `kind` that `value` encodes; raises ValueError."""
    return typing.cast("T", _decoder(kind)(value))


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@cache
def _decoder(kind: object) -> Decoder:
    if kind in (str, int, float, bool):
        return _scalar(typing.cast("type", kind))
    if kind is bytes:
        return _bytes
    if kind is type(None):
        return _none
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return _sequence(arguments[0]) if arguments[-1] is Ellipsis else _row(arguments)
    if origin in (types.UnionType, typing.Union):
        return _optional(arguments)
    if isinstance(kind, typing.NewType):
        return _decoder(kind.__supertype__)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _enum(kind)
    if dataclasses.is_dataclass(kind):
        return _record(typing.cast("type", kind))
    raise TypeError(f"no JSON form for {kind}")


def _scalar(kind: type) -> Decoder:
    def scalar(value: object) -> object:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")

    return scalar


def _bytes(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError(f"expected base64, got {type(value).__name__}")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("malformed base64") from error


def _none(value: object) -> object:
    if value is not None:
        raise ValueError(f"expected null, got {type(value).__name__}")
    return None


def _sequence(item: object) -> Decoder:
    decode_item = _decoder(item)

    def sequence(value: object) -> object:
        return tuple([decode_item(each) for each in _list(value)])

    return sequence


def _row(items: tuple[object, ...]) -> Decoder:
    decoders = tuple(_decoder(item) for item in items)

    def row(value: object) -> object:
        cells = _list(value)
        if len(cells) != len(decoders):
            raise ValueError(f"expected {len(decoders)} items, got {len(cells)}")
        return tuple([decode_cell(cell) for decode_cell, cell in zip(decoders, cells, strict=True)])

    return row


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {type(value).__name__}")
    return value


def _optional(arguments: tuple[object, ...]) -> Decoder:
    kinds = [kind for kind in arguments if kind is not type(None)]
    if len(kinds) != 1 or len(arguments) != 2:
        raise TypeError(f"only X | None has a JSON form, not {arguments}")
    decode_value = _decoder(kinds[0])
    return lambda value: None if value is None else decode_value(value)


def _enum(kind: type[StrEnum]) -> Decoder:
    def enum(value: object) -> object:
        if type(value) is not str:
            raise ValueError(f"expected str, got {type(value).__name__}")
        return kind(value)

    return enum


def _record(kind: type) -> Decoder:
    hints = typing.get_type_hints(kind)
    decoders = {field.name: _decoder(hints[field.name]) for field in dataclasses.fields(kind)}
    optional = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }

    def record(value: object) -> object:
        if not isinstance(value, dict):
            raise ValueError(f"expected an object for {kind.__name__}, got {type(value).__name__}")
        values = {}
        for name, item in value.items():
            decode_field = decoders.get(name)
            if decode_field is None:
                raise ValueError(f"{kind.__name__} has no field {name!r}")
            try:
                values[name] = decode_field(item)
            except ValueError as error:
                raise ValueError(f"{kind.__name__}.{name}: {error}") from error
        missing = decoders.keys() - values.keys() - optional
        if missing:
            raise ValueError(f"{kind.__name__} lacks {', '.join(sorted(missing))}")
        return kind(**values)

    return record
