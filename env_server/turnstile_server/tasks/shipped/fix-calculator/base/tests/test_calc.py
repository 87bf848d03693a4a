import unittest

from calc import CalcError, evaluate


class CalcTest(unittest.TestCase):
    def test_values(self) -> None:
        for text, value in [("1 + 2 * 3", 7), ("(1 + 2) * 3", 9), ("2 ^ 10", 1024), ("-3 + 5", 2)]:
            self.assertEqual(evaluate(text), value, text)

    def test_something_left_over(self) -> None:
        with self.assertRaises(CalcError):
            evaluate("1 2")


if __name__ == "__main__":
    unittest.main()
