"""Values, objects and calls across the boundary: tests and work in two processes, as tests see it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import decimal
import fractions
import inspect
import io
import math
import sys
import threading
import unittest
import uuid
from collections import Counter, OrderedDict, deque
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

import pytest

from turnstile_server.grading.inside.boundary.proxies import BoundaryError
from turnstile_server.grading.inside.boundary.work_process import WorkProcess
from waiting import wait_until_sync

VALUES = [
    None, True, 0, -1, 10**40, -(10**40), 1.5, -0.0, math.inf, 2j, "", "é\ud800\n\0", b"\x00\xff", bytearray(b"x"),
    [1, [2]], (1, (2,)), {"a": {1: 2}}, {(1, 2): 3}, {1, 2}, frozenset({1}), range(1, 10, 2), slice(1, 2), ...,
    Counter("aab"),
    OrderedDict(a=1), deque([1], maxlen=2), decimal.Decimal("1.10"), fractions.Fraction(1, 3), uuid.UUID(int=5),
    Path("/a/b"), PurePosixPath("c"), datetime.date(2024, 2, 29), datetime.timedelta(1, 2, 3),
    datetime.datetime(2024, 1, 2, 3, 4, 5, 6, datetime.UTC, fold=1), datetime.time(1, 2, 3),
]  # fmt: skip


def test_plain_values_cross_by_copy_with_their_types(lib: Any) -> None:
    for value in VALUES:
        back = lib.apply(lambda given: given, value)
        assert (type(back), repr(back)) == (type(value), repr(value))
    assert math.isnan(lib.apply(float, "nan"))


def test_shared_values_and_cycles_stay_shared(lib: Any) -> None:
    inner = [1]
    one, other = lib.apply(lambda: [inner, inner])
    assert one is other
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    assert lib.apply(lambda given: given["self"] is given, cycle)


def test_an_argument_that_a_call_changes_is_changed_and_is_the_same_object(lib: Any) -> None:
    items = [1]
    assert lib.change(items) is items
    assert items == [1, 5]


def test_objects_have_attributes_lengths_iteration_and_identity(lib: Any) -> None:
    assert list(lib.gen()) == [1, 2]
    assert lib.red() is lib.Color.RED
    assert [each.name for each in lib.Color] == ["RED", "BLUE"]
    point = lib.p()
    assert (point, point.x, point._asdict()) == ((1, 2), 1, {"x": 1, "y": 2})
    assert lib.D(1) == lib.D(1) != lib.D(2)
    assert isinstance(lib.D(1), lib.D)
    with lib.Ctx() as five:
        assert five == 5
    with lib.Ctx():
        raise ValueError("swallowed there")


def test_exceptions_arrive_as_their_class_with_text_and_attributes(lib: Any) -> None:
    case = unittest.TestCase()
    with case.assertRaises(lib.Wrong) as caught:  # noqa: PT027 - it is unittest that is tried
        lib.wrong()
    assert (str(caught.exception), caught.exception.at) == ("bad", 3)
    with pytest.raises(ValueError, match="bad"):
        lib.wrong()
    with pytest.raises(ZeroDivisionError):
        lib.div()
    with pytest.raises(SystemExit):
        lib.exit_()
    with pytest.raises(RuntimeError):
        lib.kbd()


def test_an_exception_of_a_test_comes_back_as_itself(lib: Any) -> None:
    class Boom(Exception):
        pass

    boom = Boom("b")

    def raises() -> None:
        raise boom

    with pytest.raises(Boom) as caught:
        lib.apply(raises)
    assert caught.value is boom
    assert lib.catch(raises, Boom) == ("caught", "b")


def test_functions_fakes_and_mocks_of_a_test_are_called_back(lib: Any) -> None:
    waits: list[float] = []
    fails = iter([OSError("a"), OSError("b")])

    def flaky() -> str:
        for error in fails:
            raise error
        return "done"

    assert lib.retry(flaky, sleep=waits.append) == "done"
    assert waits == [0, 1]
    fake = mock.Mock(return_value=7)
    assert lib.apply(fake, 1, key=2) == 7
    fake.assert_called_once_with(1, key=2)
    assert lib.pmap(lambda n: n * 2, [1, 2, 3]) == [2, 4, 6]
    seen: list[int] = []
    lib.later(lambda: seen.append(1), 0.01)
    wait_until_sync(lambda: seen)
    assert seen == [1]


def test_the_signature_of_a_function_is_not_seen_and_says_so(lib: Any) -> None:
    with pytest.raises(ValueError, match="no signature found"):
        inspect.signature(lib.apply)
    assert str(inspect.signature(lib.Bag)).startswith("(*args")


def test_coroutines_are_awaited_both_ways(lib: Any) -> None:
    async def double(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    async def both() -> tuple[int, int]:
        return await lib.co(1), await lib.co2(double)

    assert asyncio.run(both()) == (2, 6)
    assert asyncio.run(lib.co(3)) == 4


def test_patches_act_in_the_work(lib: Any) -> None:
    with mock.patch.object(lib.time, "sleep") as sleep:
        fails = iter([OSError("a")])
        lib.retry(lambda: [(_ for _ in ()).throw(error) for error in fails], None)
    sleep.assert_called_once_with(0)
    with mock.patch.object(lib, "two", return_value=9):
        assert lib.two(1) == 9
    assert lib.two(1) == 2


def test_what_is_printed_and_read_and_the_environment_are_the_tests(
    lib: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        lib.pr()
    assert out.getvalue() == "hello\nxxx\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("Ann\n"))
    assert lib.inp() == "Ann"
    monkeypatch.setenv("FOO", "bar")
    monkeypatch.setattr(sys, "argv", ["a", "b"])
    assert lib.envi()[:2] == ("bar", ["a", "b"])


def test_no_object_of_the_work_says_itself_what_it_equals(lib: Any) -> None:
    thing, case = lib.anything(), unittest.TestCase()
    for check in (
        lambda: thing == 4,
        lambda: thing < 4,
        lambda: thing - 4.0,
        lambda: case.assertEqual(4, thing),  # noqa: PT009
        lambda: case.assertAlmostEqual(thing, 4.0),  # noqa: PT009
        lambda: thing == lib.anything(),
        lambda: lib.nearly() == lib.nearly(),
        lambda: thing in [1, 2],
    ):
        with pytest.raises(BoundaryError):
            check()  # type: ignore[no-untyped-call]
    assert (lib.text() == "zzz", lib.text() == "abc", lib.text().upper()) == (False, True, "ABC")
    assert (lib.bag() == {"a": 2}, lib.bag() == {"a": 1}) == (False, True)
    assert (lib.lst() == [3], lib.lst() == [1, 2]) == (False, True)


def test_no_object_of_the_work_says_itself_how_far_it_is_from_a_plain_value(lib: Any) -> None:
    noon, day = datetime.datetime(2024, 1, 2, 12), datetime.date(2024, 1, 2)
    for check in (
        lambda: abs(lib.apart(False) - 4),
        lambda: abs(4 - lib.apart(False)),
        lambda: lib.zero() - 4.0,
        lambda: lib.zero() - decimal.Decimal(4),
        lambda: lib.apart(datetime.timedelta()) - noon,
        lambda: day - lib.apart(datetime.timedelta()),
        lambda: lib.apart(0.0) - noon,
        lambda: lib.apart(set()) - {1, 2},
        lambda: {1, 2} ^ lib.apart(set()),
        lambda: frozenset({1}) - lib.apart(frozenset()),
        lambda: Counter("a") - lib.apart(Counter()),
        lambda: lib.apart(set()) - {"a": 1}.keys(),
    ):
        with pytest.raises(BoundaryError):
            check()
    assert (lib.apart([3]) - [4], lib.apart("a") - "b") == ([3], "a")


@pytest.mark.parametrize(
    "name",
    [
        "__globals__",
        "__self__",
        "__closure__",
        "__code__",
        "__dict__",
        "_private",
        "__func__",
    ],
)
def test_the_work_reads_only_public_names_of_what_it_was_handed(lib: Any, name: str) -> None:
    class Fake:
        open = "yes"
        _private = "no"

    def function() -> None: ...

    assert lib.use(Fake(), "open") == "yes"
    for target in (function, [].append, (n for n in ()), lambda: None):
        with pytest.raises(AttributeError):
            lib.apply(lambda given: lib.use(given, name), target)
    if name == "_private":
        with pytest.raises(AttributeError):
            lib.use(Fake(), name)


@pytest.mark.parametrize("name", ["side_effect", "return_value", "mock_calls", "assert_called_with", "reset_mock"])
def test_the_work_does_not_steer_a_mock(lib: Any, name: str) -> None:
    with pytest.raises(AttributeError):
        lib.use(mock.Mock(), name)
    with pytest.raises(AttributeError):
        lib.apply(setattr, mock.Mock(), name, 1)


def test_what_judges_is_not_handed_out_and_what_cannot_cross_says_so(lib: Any) -> None:
    for value in (unittest.TestCase(), unittest.TestCase, sys._getframe()):
        with pytest.raises(BoundaryError):
            lib.apply(lambda given: None, value)
    with pytest.raises(BoundaryError, match="inherits from a class of the other process"):
        type("Sub", (lib.Base,), {})
    with pytest.raises(RuntimeError, match="nested deeper"):
        lib.deep(150)

    def again() -> Any:
        return lib.rec(again)

    with pytest.raises(RecursionError):
        again()
    for value in (io.StringIO("x"), threading.Event(), lambda: None):
        with pytest.raises(AttributeError, match="cannot be called"):
            lib.apply(lib.construct, value)


def test_a_work_that_ends_its_process_fails_every_later_call(work: WorkProcess, lib: Any) -> None:
    for call in (lib.die, lambda: lib.two(1), lambda: work.peer):
        with pytest.raises(BoundaryError, match="has ended"):
            call()
