"""No test that fails on a wrong value passes on an object that lies, whatever it answers: both are generated."""

from __future__ import annotations

import asyncio
import collections
import copy
import dataclasses
import datetime
import decimal
import functools
import heapq
import itertools
import json
import math
import operator
import re
import statistics
import unittest
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from boundary_support import FOLDER, StartedWork
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lying_lib import WAYS

from turnstile_server.grading.inside.boundary.operations import OPERATIONS
from turnstile_server.grading.inside.boundary.proxies import BoundaryError
from turnstile_server.grading.inside.boundary.work_process import WorkProcess


@dataclasses.dataclass(order=True)
class Box:
    """A class of a test's."""

    x: object


ANY = """
case.assertEqual(r, v)|case.assertEqual(v, r)|r == v|not r != v|{"a": r} == {"a": v}|{"a": v} == {"a": r}
[r] == [v]|(v,) == (r,)|r in [v]|v in [r]|[r].index(v) == 0|[v].index(r) == 0|[r].count(v) == 1|[v].count(r) == 1
str(r) == str(v)|repr(r) == repr(v)|f"{r}" == f"{v}"|"%s" % (r,) == "%s" % (v,)|case.assertIn(r, [v])
case.assertIn(v, [r])|case.assertCountEqual([r], [v])|case.assertCountEqual([v], [r])
case.assertListEqual([r], [v])|case.assertTupleEqual((v,), (r,))|case.assertDictEqual({1: r}, {1: v})
case.assertSequenceEqual([r], (v,))|operator.eq(r, v)|operator.eq(v, r)|mock.call(r) == mock.call(v)
mock.call(v) == mock.call(r)|Box(r) == Box(v)|called(r).assert_called_once_with(v)|called(r).assert_any_call(v)
called(r).assert_has_calls([mock.call(v)])|dataclasses.asdict(Box(r)) == {"x": v}|copy.copy(r) == v
copy.deepcopy([r]) == [v]|next(iter([r])) == v|all(a == b for a, b in zip([r], [v], strict=True))
all(map(operator.eq, [r], [v]))|any(x == v for x in [r])|not list(filter(lambda x: x != v, [r]))
list(itertools.takewhile(lambda x: x == v, [r]))|(r == v) is True|case.assertTrue(r == v)
case.assertFalse(r != v)|collections.deque([r]) == collections.deque([v])|collections.UserList([r]) == [v]
r.__eq__(v) is True|not r.__ne__(v)|not Box(r) < Box(v) and not Box(r) > Box(v)|isinstance(r, type(v)) and r == v
(r and r == v)|r == v or r is v|operator.countOf([r], v) == 1|[x for x in [r] if x == v]
asyncio.run(gathered(r)) == [v]|asyncio.run(queued(r)) == v|r == pytest.approx(v)|pytest.approx(v) == r
(r, 1) < (v, 2) and (r, 1) > (v, 0)|r >= v and r <= v and r == v|[k for k, _ in itertools.groupby([r, v])] == [v]
"""
HASHED = """
{r: 1} == {v: 1}|{v: 1}[r] == 1|{r: 1}[v] == 1|{v: 1}.get(r) == 1|r in {v}|v in {r}|{r} == {v}|not {r} - {v}
not {v} - {r}|len({r, v}) == 1|{r} & {v}|len({r} ^ {v}) == 0|frozenset([r]) == frozenset([v])
case.assertIn(r, {v: 1})|collections.Counter([r])[v] == 1|collections.Counter([r]) == collections.Counter([v])
{r} <= {v}|case.assertSetEqual({r}, {v})|dict.fromkeys([r]) == dict.fromkeys([v])
"""
NUMBER = """
case.assertAlmostEqual(r, v)|case.assertAlmostEqual(v, r)|case.assertAlmostEqual(r, v, delta=0.1)
abs(r - v) < 1e-9|case.assertAlmostEqual(v, r, places=2)|math.isclose(r, v)|math.isclose(v, r)|abs(v - r) < 1e-9
-1e-9 < r - v < 1e-9|not r - v|r - v == 0|(r - v) ** 2 < 1e-9|math.fabs(r - v) < 1e-9|round(r - v, 5) == 0
int(r - v) == 0|v - r == 0|sum([r, 1]) == v + 1|[r] == pytest.approx([v])|{"a": r} == pytest.approx({"a": v})
case.assertGreaterEqual(r, v) or case.assertLessEqual(r, v)|statistics.mean([r]) == v|int(r) == int(v)
float(r) == v|functools.reduce(operator.add, [r, 1]) == v + 1|r + 0 == v|0 + r == v|r * 1 == v|-r == -v
abs(r) == abs(v)|r / v == 1|math.dist([r], [v]) < 1e-9|math.fsum([r, -v]) == 0|statistics.pstdev([r, v]) == 0
math.sqrt((r - v) ** 2) == 0|max(r, v) == v and min(r, v) == v|sorted([r, v]) == [v, v]
json.dumps([r]) == json.dumps([v])|f"{r:.3f}" == f"{v:.3f}"
heapq.nlargest(1, [r, v]) == [v] == heapq.nsmallest(1, [r, v])|decimal.Decimal(r) == decimal.Decimal(v)
r.__sub__(v) == 0|datetime.timedelta(seconds=r) == datetime.timedelta(seconds=v)|divmod(r, v) == (1, 0)
"""
TEXT = """
case.assertRegex(r, "^" + re.escape(v) + "$")|re.fullmatch(re.escape(v), r)|r.startswith(v)|r.endswith(v)
case.assertMultiLineEqual(r, v)|"".join([r]) == v|json.loads(json.dumps(r)) == v|r.strip() == v
r.encode() == v.encode()|r.split(v) == ["", ""]|r.partition(v) == ("", v, "")|r + "x" == v + "x"
"x" + r == "x" + v|list(r) == list(v)|v.join(["", r]) == v + v|all(x == y for x, y in zip(r, v, strict=True))
r.lower() == v.lower()|r.replace("x", "y") == v|collections.Counter(r) == collections.Counter(v)
sorted(r) == sorted(v)|r[:] == v|r[::-1] == v[::-1]
"""
ITEMS = """
list(r) == list(v)|tuple(r) == tuple(v)|[*r] == [*v]|set(r) == set(v)|sorted(r) == sorted(v)
a_and_b(*r) == a_and_b(*v)|list(enumerate(r)) == list(enumerate(v))
list(zip(r, v, strict=True)) == list(zip(v, v, strict=True))|all(a == b for a, b in zip(r, v, strict=True))
all(a == b for a, b in itertools.zip_longest(r, v))|all(map(operator.eq, r, v)) and len(r) == len(v)
len(r) == len(v) and all(a == b for a, b in zip(r, v))|not set(v) - set(r)|set(v).issubset(r)
not set(v).symmetric_difference(r)|not set(v).difference(r)|set(v).intersection(r) == set(v)
case.assertCountEqual(r, v)|case.assertCountEqual(v, r)|list(map(str, r)) == list(map(str, v))
[x for x in r] == list(v)|sum(r) == sum(v) and len(r) == len(v)|max(r) == max(v) and min(r) == min(v)
list(itertools.chain(r)) == list(v)|list(itertools.islice(r, len(v))) == list(v)
functools.reduce(operator.add, r) == functools.reduce(operator.add, v)
collections.deque(r) == collections.deque(v)|json.dumps(list(r)) == json.dumps(list(v))
sorted(set(r)) == sorted(set(v))|dict.fromkeys(r) == dict.fromkeys(v)
collections.Counter(r) == collections.Counter(v)|statistics.mean(r) == statistics.mean(v)
"""
LIST = """
case.assertListEqual(r, v)|case.assertListEqual(v, r)|case.assertSequenceEqual(r, v)|r[:] == v|r + [1] == v + [1]
r.copy() == v|len(r) == len(v) and all(r[i] == v[i] for i in range(len(v)))|json.dumps(r) == json.dumps(v)
[1] + r == [1] + v|list(reversed(r)) == list(reversed(v))
[r.index(x) for x in v] == list(range(len(v))) and isinstance(r, list)
"""
SET = """
case.assertSetEqual(r, v)|case.assertSetEqual(v, r)|not r - v and not v - r|r & v == v|v & r == v|v.issubset(r)
r.issuperset(v)|r >= v|v <= r|not r ^ v|not v ^ r|not r.symmetric_difference(v)|r.intersection(v) == v
v - r == set()|r == frozenset(v)|r.difference(v) == set() and v.difference(r) == set()
"""
DICT = """
case.assertDictEqual(r, v)|case.assertDictEqual(v, r)|all(r[k] == v[k] for k in v)
all(r.get(k) == v[k] for k in v)|{**r} == v|dict(r) == v|dict(r.items()) == v|list(r.items()) == list(v.items())
r.items() == v.items()|v.items() == r.items()|v.items() <= r.items()|not v.items() - r.items()
not v.items() ^ r.items()|collections.ChainMap(r, {}) == v
r.keys() == v.keys() and list(r.values()) == list(v.values())
v.keys() == r.keys() and list(r.values()) == list(v.values())|sorted(r.items()) == sorted(v.items())
collections.OrderedDict(r) == v|json.dumps(r) == json.dumps(v)
"""
SHAPES: list[tuple[Any, str]] = [
    (738291, ANY + HASHED + NUMBER),
    (4.71831, ANY + HASHED + NUMBER),
    ("zqrwv", ANY + HASHED + TEXT),
    (b"qwzrt", ANY + HASHED),
    (
        datetime.datetime(2021, 3, 4, 5, 6, 7),
        ANY + HASHED + "not r - v|(r - v).total_seconds() == 0|r - v == r - r",
    ),
    (datetime.timedelta(seconds=7213), ANY + HASHED + "not r - v|(r - v).total_seconds() == 0|abs(r - v) < v / 9"),
    ((7381, 2912), ANY + HASHED + ITEMS + "case.assertTupleEqual(r, v)"),
    ([7381, 2912], ANY + ITEMS + LIST),
    ([7.381, 2.912], ANY + ITEMS + LIST + "case.assertAlmostEqual(r, v)|list(r) == pytest.approx(v)"),
    ({7381, 2912}, ANY + SET + "set(r) == v|sorted(r) == sorted(v)|case.assertCountEqual(r, v)"),
    ({"zqr": 7381, "wvx": 2912}, ANY + DICT + "sorted(r) == sorted(v) and sum(r.values()) == sum(v.values())"),
]
WRONG: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, float("nan"), "", "a", b"", 1j, [], {}, (), set(), frozenset()),
    *([0, 0], (0, 0), {0, 1}, {"p": 0, "q": 0}, [None, None], datetime.timedelta(), datetime.datetime(2000, 1, 1)),
]


def called(value: Any) -> mock.Mock:
    made = mock.Mock()
    made(value)
    return made


async def gathered(value: Any) -> list[Any]:
    return list(await asyncio.gather(asyncio.sleep(0, value)))


async def queued(value: Any) -> Any:
    queue: asyncio.Queue[Any] = asyncio.Queue()
    await queue.put(value)
    return await queue.get()


async def in_time(awaited: Any, seconds: float) -> Any:
    async with asyncio.timeout(seconds):
        return await awaited


def a_and_b(a: Any, b: Any) -> tuple[Any, Any]:
    return a, b


LIBRARIES = (
    collections,
    copy,
    datetime,
    decimal,
    functools,
    heapq,
    itertools,
    json,
    math,
    operator,
    re,
    statistics,
)
USED: dict[str, Any] = {
    **{each.__name__: each for each in (*LIBRARIES, asyncio, dataclasses, mock, pytest)},
    **{each.__name__: each for each in (called, gathered, queued, a_and_b, Box)},
    "mock": mock,
    "case": unittest.TestCase(),
}
"""What the assertions name, beside ``r`` (the result) and ``v`` (the value)."""


def passes(judged: str, result: Any, value: Any) -> bool:
    """Whether an assertion holds. An expression fails that is false, and one of unittest or a mock that raises."""
    try:
        found = eval(judged, {**USED, "r": result, "v": value})
        return bool(found or (found is None and "assert" in judged))
    except (Exception, BoundaryError):  # noqa: BLE001 - whatever it is, the test fails
        return False


TRIED = [
    (value, judged) for value, text in SHAPES for judged in text.replace("\n", "|").split("|") if judged.strip()
]
JUDGEMENTS = [
    (value, judged)
    for value, judged in TRIED
    if passes(judged, copy.deepcopy(value), value)
    and not any(passes(judged, copy.deepcopy(wrong), value) for wrong in WRONG)
]
"""The honest tests: each passes on its value, and on no wrong one."""
BASES: dict[str | None, Any] = {
    None: None,
    "list": [0, 0],
    "dict": {"p": 0, "q": 0},
    "set": [0, 1],
    "frozenset": [0, 1],
    "str": "zz",
    "bytes": b"zz",
    "int": 1,
    "float": 1.0,
    "complex": 1.0,
    "tuple": [0, 0],
    "bytearray": b"zz",
}
NAMES = sorted({*OPERATIONS, "__await__"} - {"__hash__", "__call__"})
PUBLIC = (
    *(
        "keys",
        "items",
        "values",
        "get",
        "copy",
        "index",
        "find",
        "split",
        "strip",
        "startswith",
        "endswith",
        "join",
    ),
    *("difference", "intersection", "union", "symmetric_difference", "issubset", "issuperset", "isdisjoint"),
    *("total_seconds", "encode", "lower", "replace", "partition", "real", "pop", "append", "assert_called_with"),
)
_WAYS = st.sampled_from(sorted(WAYS))
_ENDS = {"__next__": "StopIteration", "__getitem__": "IndexError", "__anext__": "StopIteration"}
"""What a method answers at last, so that nothing is iterated over for ever."""


def _told(name: str, ways: list[str]) -> list[str]:
    return [*ways, _ENDS[name]] if name in _ENDS else ways


_ANSWERS = st.dictionaries(st.sampled_from((*NAMES, *PUBLIC)), st.lists(_WAYS, min_size=1, max_size=2))
_ALIKE = st.tuples(_WAYS, _WAYS).map(
    lambda both: {**{n: [both[0]] for n in NAMES}, **{n: [both[1]] for n in PUBLIC}}
)
"""One answer to every operator, one to every method."""
AGREES = {
    **{name: ["true"] for name in ("__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__", "__bool__")},
    **{name: ["zero, a float"] for name in ("__abs__", "__float__", "__complex__", "__neg__")},
    **{name: ["zero"] for name in ("__int__", "__index__", "__round__", "__trunc__", "__floor__", "__ceil__")},
    **{name: ["no text"] for name in ("__str__", "__repr__", "__format__")},
    "__len__": ["two"],
}
"""An object that agrees to everything, of which others differ in some answers."""
LIARS = st.fixed_dictionaries(
    {
        "base": st.sampled_from(list(BASES)),
        "answers": st.one_of(_ANSWERS, _ANSWERS.map(lambda answers: {**AGREES, **answers}), _ALIKE),
        "others": st.one_of(st.just([]), st.lists(_WAYS, min_size=1, max_size=2)),
    }
)


class Liars:
    """The process of a work that lies; a new one where it was lost."""

    def __init__(self) -> None:
        self.work: WorkProcess | None = None
        self.lib: Any = None

    def started(self) -> Any:
        peer = None if self.work is None else self.work._peer
        if peer is None or peer.lost is not None:
            self.end()
            self.work = WorkProcess(StartedWork, [str(FOLDER)])
            made, told = self.work.import_module("lying_lib")
            self.lib = made.imports.module(told["module"], "lying_lib", None)
        return self.lib

    def end(self) -> None:
        if self.work is not None:
            self.work.end()


@pytest.fixture(scope="module")
def liars() -> Iterator[Liars]:
    made = Liars()
    yield made
    made.end()


def _lies(liars: Liars, told: dict[str, Any], judgement: tuple[Any, str]) -> None:
    value, judged = judgement
    answers = {name: _told(name, ways) for name, ways in told["answers"].items()}
    lib = liars.started()
    try:
        result = lib.liar({**told, "value": BASES[told["base"]], "answers": answers})
    except Exception:  # noqa: BLE001 - an object that cannot be made is no answer
        return
    if type(result) in (int, float, str, bool, type(None)):
        return
    assert not passes(judged, result, value)


_PLAYED = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@given(told=LIARS, judgement=st.sampled_from(JUDGEMENTS))
@settings(_PLAYED, max_examples=400)
@example(
    told={"base": "list", "answers": {"__sub__": ["zero"]}, "others": []},
    judgement=([7.381, 2.912], "case.assertAlmostEqual(r, v)"),
)
@example(told={"base": None, "answers": {"__sub__": ["no text"]}, "others": []}, judgement=(738291, "not r - v"))
@example(
    told={"base": None, "answers": {}, "others": ["a set"]},
    judgement=({7381, 2912}, "not r.symmetric_difference(v)"),
)
@example(
    told={"base": None, "answers": {}, "others": ["the argument"]},
    judgement=({7381, 2912}, "r.intersection(v) == v"),
)
@example(
    told={"base": None, "answers": {"__sub__": ["itself"]}, "others": ["zero"]},
    judgement=(datetime.timedelta(seconds=7213), "(r - v).total_seconds() == 0"),
)
def test_no_lie_passes_an_honest_test(liars: Liars, told: dict[str, Any], judgement: tuple[Any, str]) -> None:
    _lies(liars, told, judgement)


@pytest.mark.thorough
@given(told=LIARS, judgement=st.sampled_from(JUDGEMENTS))
@settings(_PLAYED, max_examples=4000, derandomize=False)
def test_no_other_lie_does(liars: Liars, told: dict[str, Any], judgement: tuple[Any, str]) -> None:
    _lies(liars, told, judgement)


def test_honest_results_pass_and_each_kind_of_test_is_played(liars: Liars) -> None:
    lib = liars.started()
    for value, judged in JUDGEMENTS:
        assert passes(judged, lib.echo(value), value), judged
    assert {judged for _, judged in TRIED} == {judged for _, judged in JUDGEMENTS}


KINDS = (ValueError, KeyError, TypeError, IndexError, ZeroDivisionError, AttributeError, OSError, RuntimeError)


@pytest.mark.parametrize("first", KINDS)
def test_no_exception_is_of_every_kind(liars: Liars, first: type[Exception]) -> None:
    """Of a class with unrelated bases the first counts."""
    names = [kind.__name__ for kind in (first, *(other for other in KINDS if other is not first))]
    with pytest.raises(first):
        liars.started().raises_everything(names)
    for other in KINDS:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which it is, is asked below
            liars.started().raises_everything(names)
        assert isinstance(caught.value, other) is (other is first)


def test_an_exception_keeps_bases_that_go_together(liars: Liars) -> None:
    lib = liars.started()
    for kind in (lib.NoKey, lib.Missing, LookupError, KeyError):
        with pytest.raises(kind):
            lib.no_key()


def test_an_exception_sets_no_method_of_its_own(liars: Liars) -> None:
    case = unittest.TestCase()
    with case.assertRaises(ValueError) as caught:  # noqa: PT027 - it is unittest that is tried
        liars.started().misled()
    assert caught.exception.code == 5  # type: ignore[attr-defined]


def test_the_work_ends_nothing_by_what_it_kept_of_a_test(liars: Liars) -> None:
    """The end of a test's iterator, or its cancellation, that the work was told of once."""
    lib = liars.started()
    lib.keeps_the_end(iter([1]))
    with pytest.raises(RuntimeError, match="StopIteration"):
        all(map(lib.raises_what_it_kept, [1, 2]))
    with pytest.raises(RuntimeError, match="StopIteration"):
        all(map(lib.Sender().send, [1, 2]))
    assert list(lib.Through(iter([1, 2]))) == [1, 2]

    async def cancelled_again() -> None:
        task = asyncio.ensure_future(lib.keeps_the_cancellation(asyncio.Event()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.TaskGroup() as group:
            group.create_task(lib.raises_what_it_kept_later())

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(cancelled_again())
    assert caught.group_contains(RuntimeError, match="CancelledError")


@pytest.mark.slow
@pytest.mark.parametrize("waits", [lambda it: asyncio.wait_for(it, 0.4), lambda it: in_time(it, 0.4)])
def test_a_tests_time_outs_bind_the_work(liars: Liars, waits: Any) -> None:
    """The event loop stands still while it waits for the work."""
    lib = liars.started()
    with pytest.raises(TimeoutError):
        asyncio.run(waits(lib.slow(0.8)))
    assert asyncio.run(waits(lib.slow(0.01))) == 1


def test_dataclasses_of_the_work_have_their_fields(liars: Liars) -> None:
    """Without them every ``asdict`` would be ``{}``, and equal to every other."""
    lib = liars.started()
    point = lib.Point(1)
    assert dataclasses.asdict(point) == {"x": 1, "y": 2, "total": 0}
    assert dataclasses.astuple(point) == (1, 2, 0)
    assert dataclasses.asdict(point) != dataclasses.asdict(lib.Point(3))
    assert [each.name for each in dataclasses.fields(lib.Point)] == ["x", "y", "total"]
    assert dataclasses.replace(point, y=5).y == 5


def test_what_holds_everything_is_told_by_no_order(liars: Liars) -> None:
    lib = liars.started()
    names = lib.Names("ann", 7)
    assert ("ann" in names, "bob" in names, 7 in names, 8 in names) == (True, False, True, False)
    held = sum(item in lib.OnlyTheFirst() for item in ["four"] * 40)
    assert held < 30
    with pytest.raises(BoundaryError):
        assert 4 in lib.class_that_holds_all()


def test_honest_objects_keep_their_methods(liars: Liars) -> None:
    lib = liars.started()
    ordered = lib.Ordered([3, 4, 3])
    assert (ordered.first(), ordered.index(4), ordered.count(3)) == (3, 1, 2)
    ordered.append(5)
    assert ordered == [3, 4, 3, 5]
    assert (lib.Number(5) - 3).value == 2
    assert (lib.Number(5) - 5).value == 0
    assert list(lib.Group(1, 2).union([3])) == [1, 2, 3]
    assert not hasattr(lib.Number(5), "__len__")
