"""Values as JSON, and frames of JSON on a socket. Pure but for the socket: knows nothing of objects and proxies.

None, booleans, text, floats and small integers are themselves in JSON. Everything else is a list whose first item
names the kind: ``["l", …]`` a list, ``["d", key, value, …]`` a dict, and so on; ``["s", n]`` is the n-th mutable
container of the same message again, so shared references and cycles arrive as such. Only exact built-in types (and
some of the standard library's, ``_VALUES``) are values; what ``export`` makes of all else is the caller's.

What must hold: decoding makes values of these types and calls no code but theirs; a message is bounded in bytes,
depth, items and digits.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import binascii
import collections
import datetime
import decimal
import fractions
import json
import pathlib
import socket
import struct
import types
import uuid
from collections.abc import Callable
from typing import Any

MAX_FRAME = 32 << 20
MAX_DEPTH = 100
MAX_ITEMS = 2_000_000
"""Values in one message."""
MAX_BITS = 1 << 20
"""Bits of an integer, at most."""
_SMALL = 1 << 60
_LENGTH = struct.Struct("!I")


class WireError(Exception):
    """Something cannot cross, or is not in this format. A sentence."""


def _moment(one: datetime.datetime) -> list[Any]:
    zone = one.tzinfo
    parts = [one.year, one.month, one.day, one.hour, one.minute, one.second, one.microsecond, one.fold]
    return [*parts, _zone(zone)]


def _zone(zone: Any) -> Any:
    if zone is None:
        return None
    if type(zone) is not datetime.timezone:
        raise WireError(f"a time zone of the type {type(zone).__name__} cannot cross")
    offset = zone.utcoffset(None)
    return offset.days * 86400 + offset.seconds


def _zoned(seconds: Any) -> datetime.timezone | None:
    return None if seconds is None else datetime.timezone(datetime.timedelta(seconds=seconds))


_VALUES: dict[type, tuple[str, Callable[[Any], list[Any]], Callable[..., Any]]] = {
    complex: ("c", lambda v: [v.real, v.imag], complex),
    bytes: ("b", lambda v: [binascii.b2a_base64(v, newline=False).decode()], binascii.a2b_base64),
    range: ("r", lambda v: [hex(v.start), hex(v.stop), hex(v.step)], lambda *v: range(*(int(n, 16) for n in v))),
    type(...): ("...", lambda v: [], lambda: ...),
    type(NotImplemented): ("ni", lambda v: [], lambda: NotImplemented),
    datetime.datetime: (
        "dt",
        _moment,
        lambda *v: datetime.datetime(*v[:7]).replace(fold=v[7], tzinfo=_zoned(v[8])),
    ),
    datetime.date: ("da", lambda v: [v.year, v.month, v.day], datetime.date),
    datetime.time: (
        "ti",
        lambda v: [v.hour, v.minute, v.second, v.microsecond, v.fold, _zone(v.tzinfo)],
        lambda *v: datetime.time(*v[:4]).replace(fold=v[4], tzinfo=_zoned(v[5])),
    ),
    datetime.timedelta: ("td", lambda v: [v.days, v.seconds, v.microseconds], datetime.timedelta),
    datetime.timezone: ("tz", lambda v: [_zone(v)], _zoned),
    decimal.Decimal: ("de", lambda v: [str(v)], decimal.Decimal),
    fractions.Fraction: (
        "fr",
        lambda v: [hex(v.numerator), hex(v.denominator)],
        lambda n, d: fractions.Fraction(int(n, 16), int(d, 16)),
    ),
    uuid.UUID: ("uu", lambda v: [v.hex], uuid.UUID),
    pathlib.PosixPath: ("pa", lambda v: [str(v)], pathlib.PosixPath),
    pathlib.PurePosixPath: ("pp", lambda v: [str(v)], pathlib.PurePosixPath),
}
_MADE = {tag: make for tag, _, make in _VALUES.values()}

_Pairs = Callable[[Any], Any]


def _flat(mapping: Any) -> list[Any]:
    return [each for pair in mapping.items() for each in pair]


_CONTAINERS: dict[type, tuple[str, Callable[[Any], list[Any]]]] = {
    list: ("l", list),
    dict: ("d", _flat),
    set: ("S", list),
    bytearray: ("B", lambda v: [bytes(v)]),
    collections.deque: ("q", lambda v: [v.maxlen, *v]),
    collections.OrderedDict: ("O", _flat),
    collections.Counter: ("C", _flat),
    collections.defaultdict: ("D", _flat),
}
"""Mutable ones: they have an identity within a message."""
_FROZEN: dict[type, tuple[str, Callable[[Any], list[Any]]]] = {
    tuple: ("t", list),
    frozenset: ("f", list),
    slice: ("sl", lambda v: [v.start, v.stop, v.step]),
    types.MappingProxyType: ("m", lambda v: [dict(v)]),
    type({}.keys()): ("k", list),
    type({}.values()): ("v", list),
    type({}.items()): ("I", list),
}
PLAIN = frozenset({type(None), bool, int, float, str, *_VALUES, *_CONTAINERS, *_FROZEN})
"""Types that cross by copy."""
Container = Any


class Encoder:
    """One message. ``containers``: the mutable ones in it, in order. ``known``: containers of an earlier message,
    by ``id``, which are sent as their number there."""

    def __init__(self, export: Callable[[Any, Encoder, int], Any], known: dict[int, int] | None = None) -> None:
        self.containers: list[Container] = []
        self._export = export
        self._known = known or {}
        self._seen: dict[int, int] = {}
        self._items = 0

    def encode(self, value: Any, depth: int = 0) -> Any:
        """Raises WireError."""
        kind = type(value)
        if kind is str or kind is bool or value is None or kind is float:
            return value
        if kind is int:
            return value if -_SMALL < value < _SMALL else ["i", _digits(value)]
        if kind in _VALUES:
            tag, parts, _ = _VALUES[kind]
            return [tag, *parts(value)]
        if depth > MAX_DEPTH:
            raise WireError(f"a value is nested deeper than {MAX_DEPTH} levels")
        if kind in _CONTAINERS:
            if id(value) in self._known:
                return ["a", self._known[id(value)]]
            if id(value) in self._seen:
                return ["s", self._seen[id(value)]]
            self._seen[id(value)] = len(self.containers)
            self.containers.append(value)
            tag, listed = _CONTAINERS[kind]
            return self.contents(tag, listed(value), depth)
        if kind in _FROZEN:
            tag, listed = _FROZEN[kind]
            return self.contents(tag, listed(value), depth)
        return self._export(value, self, depth)

    def contents(self, tag: str, items: list[Any], depth: int) -> list[Any]:
        """``items`` after their ``tag``."""
        self._items += len(items)
        if self._items > MAX_ITEMS:
            raise WireError(f"a value has more than {MAX_ITEMS} parts")
        return [tag, *[self.encode(item, depth + 1) for item in items]]

    def changed(self, container: Container) -> list[Any]:
        """The contents of a container that is ``known``."""
        tag, listed = _CONTAINERS[type(container)]
        return self.contents(tag, listed(container), 0)


def _digits(value: int) -> str:
    if value.bit_length() > MAX_BITS:
        raise WireError(f"an integer has more than {MAX_BITS} bits")
    return format(value, "x")


class Decoder:
    """One message. ``known``: the containers of the earlier message that ``["a", n]`` means."""

    def __init__(self, load: Callable[[list[Any], Decoder], Any], known: list[Container] | None = None) -> None:
        self.containers: list[Container] = []
        self._load = load
        self._known = known or []

    def decode(self, said: Any) -> Any:
        """Raises WireError for what is not this format."""
        try:
            return self._decode(said)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
            raise WireError(f"not a value: {type(error).__name__}: {error}") from None

    def _decode(self, said: Any) -> Any:
        if not isinstance(said, list):
            if isinstance(said, dict):
                raise WireError("an object of JSON is no value")
            return said
        tag, items = said[0], said[1:]
        if tag in _MADE:
            return _MADE[tag](*items)
        if tag in _DECODED:
            return _DECODED[tag](self, items)
        return self._load(said, self)

    def _again(self, items: list[Any]) -> Any:
        return self.containers[_index(items[0])]

    def _argument(self, items: list[Any]) -> Any:
        return self._known[_index(items[0])]

    def _filled(self, made: Any, fill: Callable[[Any, list[Any]], None], items: list[Any]) -> Any:
        """The container is known before its contents, which may hold it again."""
        self.containers.append(made)
        fill(made, [self._decode(item) for item in items])
        return made

    def refill(self, container: Container, said: list[Any]) -> None:
        """Replaces what a container holds by what ``Encoder.changed`` made. Raises WireError."""
        if not isinstance(said, list) or not said or _CONTAINERS[type(container)][0] != said[0]:
            raise WireError("another kind of container came back")
        try:
            items = [self._decode(item) for item in said[1:]]
            container.clear()
            _FILL[said[0]](container, items)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
            raise WireError(f"not a value: {type(error).__name__}: {error}") from None


def _index(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError("not the number of a container")
    return number


def _fill_mapping(made: Any, items: list[Any]) -> None:
    dict.update(made, zip(items[::2], items[1::2]))  # noqa: B905 - Python 3.9


_FILL: dict[str, Callable[[Any, list[Any]], None]] = {
    "l": lambda made, items: made.extend(items),
    "d": _fill_mapping,
    "S": lambda made, items: made.update(items),
    "B": lambda made, items: made.extend(items[0]),
    "q": lambda made, items: made.extend(items[1:]),
    "O": lambda made, items: made.update(zip(items[::2], items[1::2])),  # noqa: B905 - Python 3.9
    "C": _fill_mapping,
    "D": _fill_mapping,
}


def _container(tag: str, make: Callable[[], Any]) -> Callable[[Decoder, list[Any]], Any]:
    return lambda decoder, items: decoder._filled(make(), _FILL[tag], items)


def _all(decoder: Decoder, items: list[Any]) -> list[Any]:
    return [decoder._decode(item) for item in items]


def _queue(decoder: Decoder, items: list[Any]) -> Any:
    return decoder._filled(collections.deque(maxlen=items[0]), _FILL["q"], items)


_DECODED: dict[str, Callable[[Decoder, list[Any]], Any]] = {
    "i": lambda decoder, items: _big(items[0]),
    "s": Decoder._again,
    "a": Decoder._argument,
    "l": _container("l", list),
    "d": _container("d", dict),
    "S": _container("S", set),
    "B": _container("B", bytearray),
    "q": _queue,
    "O": _container("O", collections.OrderedDict),
    "C": _container("C", collections.Counter),
    "D": _container("D", collections.defaultdict),
    "t": lambda decoder, items: tuple(_all(decoder, items)),
    "f": lambda decoder, items: frozenset(_all(decoder, items)),
    "sl": lambda decoder, items: slice(*_all(decoder, items)),
    "m": lambda decoder, items: types.MappingProxyType(*_all(decoder, items)),
    "k": lambda decoder, items: dict.fromkeys(_all(decoder, items)).keys(),
    "v": lambda decoder, items: dict(enumerate(_all(decoder, items))).values(),
    "I": lambda decoder, items: dict(_all(decoder, items)).items(),
}


def _big(digits: str) -> int:
    if len(digits) > MAX_BITS // 4 + 2:
        raise WireError(f"an integer has more than {MAX_BITS} bits")
    return int(digits, 16)


class Channel:
    """Frames over a stream socket: the length, then JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb", buffering=1 << 16)

    def send(self, message: Any) -> None:
        """Raises WireError for a message that is too long, OSError where the other side is gone."""
        try:
            data = json.dumps(message, separators=(",", ":")).encode()
        except (ValueError, RecursionError) as error:
            raise WireError(f"a value cannot cross: {error}") from None
        if len(data) > MAX_FRAME:
            raise WireError(f"a value has {len(data)} bytes; at most {MAX_FRAME} can cross")
        self._connection.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> dict[str, Any]:
        """Raises WireError, OSError; EOFError at the end."""
        head = self._reader.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            raise EOFError
        (length,) = _LENGTH.unpack(head)
        if length > MAX_FRAME:
            raise WireError(f"a message of {length} bytes was announced")
        data = self._reader.read(length)
        if len(data) < length:
            raise EOFError
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise WireError(f"a message is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise WireError("a message is not an object")
        return message

    def close(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
