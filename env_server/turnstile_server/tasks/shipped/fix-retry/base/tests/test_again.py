import unittest

from again.call import call
from again.policy import delays


class AgainTest(unittest.TestCase):
    def test_success_needs_no_wait(self) -> None:
        waits: list[float] = []
        self.assertEqual(call(lambda: 7, sleep=waits.append), 7)
        self.assertEqual(waits, [])

    def test_delays_begin_with_the_first(self) -> None:
        self.assertEqual(next(delays(5, 0.5, 2, 60)), 0.5)


if __name__ == "__main__":
    unittest.main()
