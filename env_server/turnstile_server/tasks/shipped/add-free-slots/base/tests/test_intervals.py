import unittest

from planner.intervals import merge


class MergeTest(unittest.TestCase):
    def test_apart(self) -> None:
        self.assertEqual(merge([(5, 6), (1, 2)]), [(1, 2), (5, 6)])

    def test_overlapping(self) -> None:
        self.assertEqual(merge([(1, 4), (3, 6)]), [(1, 6)])


if __name__ == "__main__":
    unittest.main()
