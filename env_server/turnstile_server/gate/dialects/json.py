"""Reads JSON bodies: typed fields, with errors that name the field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import orjson

from turnstile_server.errors import InvalidRequest

JsonObject = Mapping[str, Any]

MAX_OPTION_DEPTH = 100
"""The most levels of an option that is recorded: parsers with a limit must be able to read the record."""

MAX_OPTION_BYTES = 1 << 18
"""The most bytes of an option that is recorded, as JSON: it is in the record of every turn."""

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 4_096
"""The longest stop string: the engine compares it with what it samples."""

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_PIECES = re.compile(
    rb"(?P<lone>\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})|[c-fC-F][0-9a-fA-F]{2}))"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?:[^\\]+|\\[^u]|\\u(?![dD][89a-fA-F])){1,4096}|\\",
    re.DOTALL,
)
"""A body in pieces: half a surrogate pair, a whole pair, and what has neither. No search takes long: nothing
follows what repeats, so nothing is tried again. (Possessive repeats would say so, which Python 3.11.2, that of
Debian 12, takes wrongly.)"""


_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""The first bytes of gzip (RFC 1952, 2.3.1) and zstd (RFC 8878, 3.1.1)."""


def read_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises InvalidRequest.

    A lone surrogate escape (``\\ud83d`` cut in half, as JavaScript clients write it) becomes U+FFFD: the text
    could not be encoded for the model, and refusing the call would lose the whole conversation.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:
            value = orjson.loads(_repaired(body))
        except ValueError:
            if body.startswith(_COMPRESSED):
                message = (
                    "the body is compressed, which this server does not read: send it without Content-Encoding"
                )
                raise InvalidRequest(message) from None
            raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {kind(value)}")
    return value


def _repaired(body: bytes) -> bytes:
    """The body in UTF-8, without lone surrogates. Never parsed by ``json``, which keeps the interpreter lock for
    five times as long as ``orjson``. Raises UnicodeDecodeError."""
    if not body.isascii() or b"\0" in body:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        body = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
    if not _SURROGATE_ESCAPE.search(body):
        return body
    return b"".join(b"\\ufffd" if piece.lastgroup == "lone" else piece.group() for piece in _PIECES.finditer(body))


def _without_lone_surrogates(value: Any) -> str:
    written = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return written.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def kind(value: Any) -> str:
    """The JSON name of a value's type."""
    names: dict[type, str] = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def text(source: JsonObject, key: str, where: str = "") -> str | None:
    """An optional string field."""
    value = source.get(key)
    if value is None or isinstance(value, str):
        return value
    raise InvalidRequest(f"{where}{key} must be a string, not {kind(value)}")


def flag(source: JsonObject, key: str) -> bool:
    value = source.get(key)
    if value is None:
        return False
    if isinstance(value, bool):
        return value
    raise InvalidRequest(f"{key} must be true or false, not {kind(value)}")


def objects(source: JsonObject, key: str, where: str = "") -> list[dict[str, Any]]:
    """An optional array of objects; absent or null is empty."""
    value = source.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequest(f"{where}{key} must be an array, not {kind(value)}")
    check_objects(value, f"{where}{key}")
    return value


def check_objects(items: Sequence[Any], name: str, start: int = 0) -> None:
    """Raises InvalidRequest for the first of ``items`` that is no object. ``start``: the first one's index."""
    for index, item in enumerate(items, start):
        if not isinstance(item, dict):
            raise InvalidRequest(f"{name}[{index}] must be an object, not {kind(item)}")


def positive_int(source: JsonObject, key: str) -> int | None:
    value = source.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequest(f"{key} must be a whole number above 0, not {value!r}")
    return value


def dumped(value: Any, where: str) -> str:
    """``value`` as JSON text without spaces. Raises InvalidRequest for a value that is nested too deeply."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        raise InvalidRequest(f"{where} is nested too deeply") from None


def strict_arguments(arguments: str) -> str:
    """A call's arguments as JSON that every client reads.

    They stay as the model wrote them, except for what Python's parser accepts and strict ones refuse: half a
    surrogate pair becomes U+FFFD, a number beyond a double null.
    """
    try:
        orjson.loads(arguments)
        return arguments
    except orjson.JSONDecodeError:
        pass
    try:
        value = json.loads(arguments, parse_int=_number, parse_float=_number, parse_constant=_number)
        return _without_lone_surrogates(value)
    except (ValueError, RecursionError):
        return arguments  # nested deeper than these go


def _number(written: str) -> int | float | None:
    value = float(written)
    if not isfinite(value):
        return None
    return value if {".", "e", "E"} & set(written) else int(written)


def recorded(source: JsonObject, names: Iterable[str], where: str = "") -> dict[str, Any]:
    """The options of these names that the request has, as they came.

    Raises InvalidRequest for one that is nested deeper than ``MAX_OPTION_DEPTH`` or larger than
    ``MAX_OPTION_BYTES``.
    """
    return {name: _small(source[name], f"{where}{name}") for name in names if source.get(name) is not None}


def _small(value: Any, where: str) -> Any:
    if isinstance(value, str | list | dict) and len(dumped(_shallow(value, where), where)) > MAX_OPTION_BYTES:
        raise InvalidRequest(f"{where} is larger than {MAX_OPTION_BYTES} bytes")
    return value


def _shallow(value: Any, where: str) -> Any:
    level = [value]
    for _ in range(MAX_OPTION_DEPTH):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        if not inner:
            return value
        level = [one for ones in inner for one in ones]
    raise InvalidRequest(f"{where} is nested deeper than {MAX_OPTION_DEPTH} levels")


def stop_strings(value: Any, where: str, *, one_alone: bool = False) -> tuple[str, ...]:
    """An optional array of stop strings.

    ``one_alone``: a single string is accepted too. Raises InvalidRequest.
    """
    if value is None:
        return ()
    strings = [value] if one_alone and isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(one, str) and one for one in strings):
        array = "a non-empty string or an array of them" if one_alone else "an array of non-empty strings"
        raise InvalidRequest(f"{where} must be {array}")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{where} has {len(strings)} strings; at most {MAX_STOP_STRINGS} are accepted")
    if max(map(len, strings), default=0) > MAX_STOP_CHARS:
        raise InvalidRequest(f"{where} has a string of more than {MAX_STOP_CHARS} characters")
    return tuple(strings)
