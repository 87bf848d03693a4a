"""A work with something of everything: imported in a process of its own by test_boundary.py, never here."""
# ruff: noqa
# mypy: ignore-errors

import time, enum, collections, dataclasses


class S(str):
    def __eq__(s, o):
        return True

    __hash__ = str.__hash__


P = collections.namedtuple("P", "x y")


def p():
    return P(1, 2)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def red():
    return Color.RED


def apply(f, *a, **k):
    return f(*a, **k)


def gen():
    yield 1
    yield 2


async def co(x):
    return x + 1


async def co2(f):
    return await f(3)


def retry(f, sleep=time.sleep):
    for i in range(3):
        try:
            return f()
        except OSError:
            time.sleep(i) if sleep is None else sleep(i)


def pr():
    print("hello")
    print("x" * 3)


@dataclasses.dataclass
class D:
    a: int
    b: str = "x"


def catch(f, E):
    try:
        return f()
    except E as e:
        return "caught", str(e)


def div():
    return 1 / 0


def cnt():
    return collections.Counter("aab")


def two(x):
    return 2 * x


import threading, concurrent.futures


def pmap(f, xs):
    with concurrent.futures.ThreadPoolExecutor(4) as p:
        return list(p.map(f, xs))


def later(f, d):
    threading.Timer(d, f).start()


class Bag(dict):
    def __eq__(s, o):
        return True


def bag():
    return Bag(a=1)


class L(list):
    def __eq__(s, o):
        return True


def lst():
    return L([1, 2])


def die():
    import os

    os._exit(0)


def exit_():
    raise SystemExit(3)


def kbd():
    raise KeyboardInterrupt


def deep(n):
    return [deep(n - 1)] if n else 1


def rec(f):
    return f()


def forge():
    class X(Exception):
        def __str__(s):
            raise RuntimeError("evil")

        @property
        def args(s):
            return [1]

    raise X(1)


class Ctx:
    def __enter__(s):
        return 5

    def __exit__(s, *a):
        return a[0] is ValueError


class Base:
    def hi(self):
        return 1


import functools


def memo(f):
    @functools.wraps(f)
    def inner(*a):
        return f(*a)

    return inner


def inp():
    return input("name? ")


def envi():
    import os, sys

    return os.environ.get("FOO"), sys.argv, os.getcwd()


def construct(thing, *args):
    return type(thing)(*args)


def use(fake, name):
    return getattr(fake, name)


def change(items):
    items.append(5)
    return items


class Wrong(ValueError):
    def __init__(self, text, at=3):
        super().__init__(text)
        self.at = at


def wrong():
    raise Wrong("bad")


class Anything:
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0

    def __sub__(self, other):
        return 0.0

    def __lt__(self, other):
        return True

    def __contains__(self, other):
        return True


def anything():
    return Anything()


class Nearly:
    """Equal to anything, in a truth that is no bool."""

    def __eq__(self, other):
        return 1 if isinstance(other, Nearly) else Anything()

    __hash__ = None


class Zero(float):
    pass


class Apart:
    """How far it is from a plain value, it says itself, in a value of any kind."""

    def __init__(self, difference):
        self._difference = difference

    def __sub__(self, other):
        return self._difference

    __rsub__ = __xor__ = __rxor__ = __truediv__ = __sub__


def apart(difference):
    return Apart(difference)


def zero():
    return Apart(Zero(0))


def nearly():
    return Nearly()


def text():
    return S("abc")


class Hollow(list):
    """Says what it has, and iterates over nothing."""

    def __iter__(self):
        return iter(())


class HollowDict(dict):
    def __iter__(self):
        return iter(())

    def keys(self):
        return {}.keys()


class Sized:
    """No list, but with the length of one."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        return iter(self.items)


class HollowSized(Sized):
    def __iter__(self):
        return iter(())


class Growing(list):
    """Honest: iterates over more than it holds."""

    def __iter__(self):
        return iter([*list.__iter__(self), 9])


def hollow(kind, items):
    return {"list": Hollow, "dict": HollowDict, "sized": lambda items: HollowSized(*items)}[kind](items)


def sized(*items):
    return Sized(*items)


def grown(items):
    return Growing(items)


def nothing_left(x=None, *rest):
    raise StopIteration


class NothingLeft:
    @property
    def name(self):
        raise StopIteration

    def __len__(self):
        raise StopIteration

    def __getitem__(self, at):
        raise StopIteration

    def __call__(self, *x):
        raise StopIteration


def echoing():
    got = 0
    while got is not None:
        got = yield got


async def echoing_async():
    got = 0
    while got is not None:
        got = yield got


async def nothing_left_async(x=None):
    raise StopAsyncIteration


async def cancelled():
    import asyncio

    raise asyncio.CancelledError


async def waits(event):
    await event.wait()
    return "done"


def fills(target):
    target.check = lambda *x: True
    return target
