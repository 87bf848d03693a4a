"""Nothing that the work sends steers the code between it and a test: iteration, tasks, libraries that compare."""

from __future__ import annotations

import asyncio
import operator
import unittest
from typing import Any

import pytest

from turnstile_server.grading.inside.boundary.proxies import BoundaryError

ITEMS: dict[str, Any] = {"list": [1.5, 2.5], "dict": {"a": 1.5}, "sized": [1.5, 2.5]}


@pytest.mark.parametrize("kind", ["list", "dict", "sized"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_a_library_that_compares_finds_no_empty_thing_of_the_right_length(
    lib: Any,
    kind: str,
    nested: bool,
    left: bool,
) -> None:
    """``pytest.approx`` compares lengths, then what iterating gives, pair by pair."""
    wanted = {"list": [7.0, 8.0], "dict": {"a": 7.0}, "sized": [7.0, 8.0]}[kind]
    found = lib.hollow(kind, ITEMS[kind])
    one, other = ([found], [pytest.approx(wanted)]) if nested else (found, pytest.approx(wanted))
    with pytest.raises((AssertionError, BoundaryError)):
        assert one == other if left else other == one


def test_honest_things_compare_as_in_one_process(lib: Any) -> None:
    assert lib.sized(1.5, 2.5) == pytest.approx([1.5, 2.5])
    assert pytest.approx([1.5, 2.5]) == lib.sized(1.5, 2.5)
    assert list(lib.sized(1, 2)) == [1, 2]
    assert len(lib.sized(1, 2)) == 2
    assert [*lib.grown([1])] == [1, 9]
    assert lib.grown([1]) == [1, 9]
    assert len(lib.grown([1])) == 2


def test_a_list_that_iterates_over_nothing_is_an_empty_list(lib: Any) -> None:
    found = lib.hollow("list", [1, 2])
    assert (len(found), list(found), found == []) == (0, [], True)
    assert lib.hollow("dict", {"a": 1}) == {}


@pytest.mark.parametrize(
    "judged",
    [
        lambda lib: all(map(lib.nothing_left, [1, 2])),
        lambda lib: list(map(lib.nothing_left, [1, 2])),
        lambda lib: list(filter(lib.nothing_left, [1, 2])),
        lambda lib: all(a == b for a, b in zip([1], map(lib.nothing_left, [1]), strict=True)),
        lambda lib: list(map(len, [lib.NothingLeft()])),
        lambda lib: list(map(operator.attrgetter("name"), [lib.NothingLeft()])),
        lambda lib: list(map(operator.itemgetter(0), [lib.NothingLeft()])),
        lambda lib: list(map(lib.NothingLeft(), [1])),
        lambda lib: list(map(lib.NothingLeft().__call__, [1])),
        lambda lib: list(map(lib.apply, [lib.nothing_left])),
    ],
)
def test_the_end_of_an_iteration_comes_of_iterators_alone(lib: Any, judged: Any) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        judged(lib)


def test_iterators_and_generators_of_the_work_end(lib: Any) -> None:
    assert list(lib.gen()) == [1, 2]
    found = iter(lib.gen())
    assert (next(found), next(found), next(found, "none")) == (1, 2, "none")
    echo = lib.echoing()
    assert (next(echo), echo.send(5)) == (0, 5)
    with pytest.raises(StopIteration):
        echo.send(None)


def test_asynchronous_ends_too(lib: Any) -> None:
    class Own:
        def __aiter__(self) -> Own:
            return self

        async def __anext__(self) -> Any:
            return await lib.nothing_left_async()

    async def with_lies() -> None:
        async for _ in Own():
            pass

    async def honestly() -> list[int]:
        echo = lib.echoing_async()
        got = [await anext(echo), await echo.asend(3)]
        with pytest.raises(StopAsyncIteration):
            await echo.asend(None)
        return got

    with pytest.raises(RuntimeError, match="StopAsyncIteration"):
        asyncio.run(with_lies())
    assert asyncio.run(honestly()) == [0, 3]


def test_the_work_cancels_no_task_of_a_test(lib: Any) -> None:
    async def grouped() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(lib.cancelled())  # one that is cancelled is no failure of its group

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(grouped())
    assert caught.group_contains(RuntimeError, match="CancelledError")


def test_a_task_that_a_test_cancels_is_cancelled(lib: Any) -> None:
    async def cancels() -> bool:
        task = asyncio.ensure_future(lib.waits(asyncio.Event()))
        await asyncio.sleep(0.05)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return True
        return False

    assert asyncio.run(cancels())


def test_the_work_sets_nothing_of_a_tests_object(lib: Any) -> None:
    class Fake:
        def check(self, value: object) -> bool:
            return value == 4

    fake = Fake()
    with pytest.raises(AttributeError, match="in_process"):
        lib.fills(fake)
    assert vars(fake) == {}
    assert not fake.check(5)


def test_assertions_see_what_the_work_raises(lib: Any) -> None:
    case = unittest.TestCase()
    with case.assertRaises(RuntimeError):  # noqa: PT027 - it is unittest that is tried
        lib.nothing_left()
