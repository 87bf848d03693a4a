import unittest

from planner.intervals import merge
from planner.slots import free_slots

DAY = (9 * 60, 17 * 60)


class Merge(unittest.TestCase):
    def test_touching_are_one(self) -> None:
        self.assertEqual(merge([(90, 120), (60, 90)]), [(60, 120)])

    def test_a_short_one_inside_a_long_one(self) -> None:
        self.assertEqual(merge([(0, 100), (10, 20), (30, 40), (100, 110)]), [(0, 110)])

    def test_nothing(self) -> None:
        self.assertEqual(merge([]), [])

    def test_the_argument_stays(self) -> None:
        intervals = [(5, 6), (1, 2)]
        merge(intervals)
        self.assertEqual(intervals, [(5, 6), (1, 2)])


class FreeSlots(unittest.TestCase):
    def test_an_empty_day_is_one_slot(self) -> None:
        self.assertEqual(free_slots([], DAY, 30), [DAY])

    def test_between_meetings(self) -> None:
        busy = [(600, 660), (720, 780)]
        self.assertEqual(free_slots(busy, DAY, 30), [(540, 600), (660, 720), (780, 1020)])

    def test_too_short_ones_are_left_out(self) -> None:
        busy = [(560, 600), (620, 1000)]
        self.assertEqual(free_slots(busy, DAY, 20), [(540, 560), (600, 620), (1000, 1020)])
        self.assertEqual(free_slots(busy, DAY, 21), [])

    def test_meetings_that_overlap_and_are_not_sorted(self) -> None:
        busy = [(700, 800), (540, 600), (750, 760), (600, 650)]
        self.assertEqual(free_slots(busy, DAY, 1), [(650, 700), (800, 1020)])

    def test_meetings_over_the_edges_of_the_day(self) -> None:
        busy = [(0, 600), (1000, 1300), (1310, 1400), (10, 20)]
        self.assertEqual(free_slots(busy, DAY, 1), [(600, 1000)])

    def test_a_full_day(self) -> None:
        self.assertEqual(free_slots([(0, 1440)], DAY, 1), [])

    def test_a_length_below_one_is_refused(self) -> None:
        with self.assertRaises(ValueError):
            free_slots([], DAY, 0)
