import unittest

from again.call import call
from again.policy import delays


class Flaky:
    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


class Delays(unittest.TestCase):
    def test_one_fewer_than_attempts(self) -> None:
        self.assertEqual(list(delays(4, 1, 2, 100)), [1, 2, 4])
        self.assertEqual(list(delays(1, 1, 2, 100)), [])

    def test_none_is_above_the_ceiling(self) -> None:
        self.assertEqual(list(delays(6, 1, 3, 5)), [1, 3, 5, 5, 5])
        self.assertEqual(list(delays(3, 9, 2, 5)), [5, 5])


class Call(unittest.TestCase):
    def test_it_waits_between_attempts(self) -> None:
        waits: list[float] = []
        flaky = Flaky(OSError("a"), OSError("b"))
        self.assertEqual(call(flaky, attempts=3, first=1, factor=2, sleep=waits.append), "done")
        self.assertEqual((flaky.calls, waits), (3, [1, 2]))

    def test_the_last_error_is_raised_without_a_wait(self) -> None:
        waits: list[float] = []
        flaky = Flaky(OSError("a"), OSError("b"), OSError("c"))
        with self.assertRaisesRegex(OSError, "b"):
            call(flaky, attempts=2, first=1, factor=2, sleep=waits.append)
        self.assertEqual((flaky.calls, waits), (2, [1]))

    def test_other_errors_are_raised_at_once(self) -> None:
        waits: list[float] = []
        flaky = Flaky(KeyError("x"))
        with self.assertRaises(KeyError):
            call(flaky, sleep=waits.append)
        self.assertEqual((flaky.calls, waits), (1, []))

    def test_the_errors_can_be_chosen(self) -> None:
        flaky = Flaky(KeyError("x"), ValueError("y"))
        self.assertEqual(call(flaky, errors=(KeyError, ValueError), sleep=lambda delay: None), "done")

    def test_one_attempt(self) -> None:
        flaky = Flaky(OSError("a"))
        with self.assertRaises(OSError):
            call(flaky, attempts=1, sleep=lambda delay: None)

    def test_fewer_than_one_attempt_is_refused(self) -> None:
        flaky = Flaky()
        with self.assertRaises(ValueError):
            call(flaky, attempts=0)
        self.assertEqual(flaky.calls, 0)
