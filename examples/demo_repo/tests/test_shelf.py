import unittest

from shelf import OutOfStock, Shelf, report


class ShelfTest(unittest.TestCase):
    def test_put_and_take(self) -> None:
        shelf = Shelf()
        shelf.put("bolt", 12)
        shelf.take("bolt", 5)
        self.assertEqual(shelf.count("bolt"), 7)

    def test_taking_too_much_is_refused(self) -> None:
        shelf = Shelf()
        shelf.put("bolt", 2)
        with self.assertRaises(OutOfStock):
            shelf.take("bolt", 3)
        self.assertEqual(shelf.count("bolt"), 2)

    def test_report_aligns_counts(self) -> None:
        shelf = Shelf()
        shelf.put("nut", 100)
        shelf.put("washer", 5)
        self.assertEqual(report(shelf), "nut     100\nwasher    5")


if __name__ == "__main__":
    unittest.main()
