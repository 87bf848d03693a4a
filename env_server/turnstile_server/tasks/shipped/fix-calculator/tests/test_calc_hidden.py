import unittest

from calc import CalcError, evaluate


class Values(unittest.TestCase):
    def values(self, *cases: tuple[str, float]) -> None:
        for text, value in cases:
            self.assertAlmostEqual(evaluate(text), value, msg=text)

    def test_from_the_left(self) -> None:
        self.values(("8 - 3 - 2", 3), ("8 - 3 + 2", 7), ("16 / 4 / 2", 2), ("16 / 4 * 2", 8))

    def test_power_from_the_right(self) -> None:
        self.values(("2 ^ 3 ^ 2", 512), ("2 * 3 ^ 2", 18), ("(2 ^ 3) ^ 2", 64))

    def test_signs(self) -> None:
        self.values(("-2 ^ 2", -4), ("(-2) ^ 2", 4), ("+3", 3), ("--3", 3), ("2 * -3", -6), ("4 - -1", 5))

    def test_signs_of_exponents(self) -> None:
        self.values(("2 ^ -1", 0.5), ("2 ^ -2 ^ 2", 0.0625), ("2 ^ +3", 8))

    def test_numbers(self) -> None:
        self.values((".5", 0.5), ("3.5 + .5", 4), ("10", 10))

    def test_spaces_do_not_matter(self) -> None:
        self.values((" 1+2 ", 3), ("( 1 )", 1), ("2^ 2", 4), ("7 ", 7))

    def test_it_returns_floats(self) -> None:
        self.assertIsInstance(evaluate("1 + 1"), float)


class BadInput(unittest.TestCase):
    def bad(self, *texts: str) -> None:
        self.assertEqual(CalcError.__name__, "CalcError")  # not a name for any exception
        for text in texts:
            with self.assertRaises(CalcError, msg=text):
                evaluate(text)

    def test_incomplete(self) -> None:
        self.bad("", "  ", "1 +", "2 *", "2 ^", "-", "(")

    def test_parentheses_that_do_not_match(self) -> None:
        self.bad("(1", "((1)", "1)", "()")

    def test_characters_that_mean_nothing(self) -> None:
        self.bad("1 $ 2", "x", "1 + a", "2 ** 3", "1,5")

    def test_numbers_that_are_none(self) -> None:
        self.bad("1.2.3", ".", "1 2")

    def test_division_by_zero(self) -> None:
        self.bad("1 / 0", "1 / (2 - 2)", "0 ^ -1")
