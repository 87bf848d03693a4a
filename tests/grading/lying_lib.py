"""A work that solves nothing: its objects and exceptions answer what they are told to, never what is asked.

Imported in a process of its own by test_lying_works.py, never here. An object is told by a dict: ``base`` and
``value`` (a built-in class, or None, and what it is made of), ``answers`` (the names of methods, with what each does
in turn, by its name in ``WAYS``), ``others`` (the same for every other public name).
"""
# ruff: noqa
# mypy: ignore-errors

import builtins
import dataclasses
import datetime


def _raises(kind):
    def way(own, args):
        raise kind("no")

    return way


class _Seen:
    """What was last asked about."""

    last = ()


def _remember(own, args):
    _Seen.last = args
    return True


def _copy(own, args):
    return type(args[0])(args[0]) if args and isinstance(args[0], (list, tuple, set, dict, str)) else own


WAYS = {
    "true": lambda own, args: True,
    "false": lambda own, args: False,
    "zero": lambda own, args: 0,
    "one": lambda own, args: 1,
    "two": lambda own, args: 2,
    "zero, a float": lambda own, args: 0.0,
    "nan": lambda own, args: float("nan"),
    "no time": lambda own, args: datetime.timedelta(),
    "no text": lambda own, args: "",
    "no bytes": lambda own, args: b"",
    "none": lambda own, args: None,
    "a list": lambda own, args: [],
    "a dict": lambda own, args: {},
    "a set": lambda own, args: set(),
    "an iterator": lambda own, args: iter(()),
    "not implemented": lambda own, args: NotImplemented,
    "itself": lambda own, args: own,
    "the argument": lambda own, args: args[0] if args else own,
    "a copy of the argument": _copy,
    "iterates over the argument": lambda own, args: iter(args),
    "remember": _remember,
    "what is remembered": lambda own, args: _Seen.last[0] if _Seen.last else own,
    "iterates over what is remembered": lambda own, args: iter(_Seen.last),
    "StopIteration": _raises(StopIteration),
    "IndexError": _raises(IndexError),
    "KeyError": _raises(KeyError),
    "AttributeError": _raises(AttributeError),
    "TypeError": _raises(TypeError),
    "NotImplementedError": _raises(NotImplementedError),
}


def _method(ways):
    left = list(ways)
    return lambda own, *args, **kwargs: WAYS[left.pop(0) if len(left) > 1 else left[0]](own, args)


def liar(told):
    _Seen.last = ()
    base = vars(builtins)[told["base"]] if told["base"] else object
    namespace = {name: _method(ways) for name, ways in told["answers"].items()}
    namespace["__hash__"] = lambda own: 0
    if told["others"]:
        method = _method(told["others"])

        def other(own, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *args, **kwargs: method(own, *args, **kwargs)

        namespace["__getattr__"] = other
    kind = type("Liar", (base,), namespace)
    return kind(told["value"]) if told["base"] else kind()


def echo(value):
    return value


def raises_everything(names):
    """One exception that is of all these classes, as far as they go together."""
    bases = []
    for name in names:
        try:
            type("Everything", (*bases, vars(builtins)[name]), {})
        except TypeError:
            continue
        bases.append(vars(builtins)[name])
    raise type("Everything", tuple(bases), {})("anything")


class Missing(LookupError):
    pass


class NoKey(Missing, KeyError):
    pass


def no_key():
    raise NoKey("k")


_kept = []


def keeps_the_end(iterator):
    """Reads a test's iterator, and keeps what told its end."""
    try:
        while True:
            next(iterator)
    except StopIteration as end:
        _kept.append(end)


async def keeps_the_cancellation(event):
    try:
        await event.wait()
    except BaseException as error:
        _kept.append(error)
        raise


def raises_what_it_kept(*args):
    raise _kept[-1]


async def raises_what_it_kept_later():
    raise _kept[-1]


class Through:
    """Honest: an iterator of a test's iterator."""

    def __init__(self, inner):
        self._inner = inner

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._inner)


class Sender:
    def send(self, message):
        raise StopIteration


@dataclasses.dataclass
class Point:
    x: int
    y: int = 2
    total: int = dataclasses.field(default=0, init=False)


class Names:
    """Holds names, without an iteration."""

    def __init__(self, *names):
        self._names = names

    def __contains__(self, name):
        return name in self._names


class OnlyTheFirst:
    """Holds what it is asked for first."""

    def __init__(self):
        self._asked = False

    def __contains__(self, item):
        was, self._asked = self._asked, True
        return not was


class _Meta(type):
    def __contains__(cls, item):
        return True


class HoldsAll(metaclass=_Meta):
    pass


def class_that_holds_all():
    return HoldsAll


class Ordered(list):
    """Honest: a list with a method of its own."""

    def first(self):
        return self[0]


class Number:
    """Honest: numbers with a unit."""

    def __init__(self, value):
        self.value = value

    def __sub__(self, other):
        return Number(self.value - (other.value if isinstance(other, Number) else other))


class Group:
    """Honest: a set of its own kind."""

    def __init__(self, *members):
        self.members = list(members)

    def __iter__(self):
        return iter(self.members)

    def union(self, others):
        return Group(*self.members, *others)


def misled():
    error = ValueError("x")
    error.with_traceback = "no method"
    error.code = 5
    raise error


async def slow(seconds):
    import asyncio

    await asyncio.sleep(seconds)
    return 1
