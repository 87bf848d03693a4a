import unittest

from shop.cart import Cart
from shop.discounts import best_discount


class Discounts(unittest.TestCase):
    def test_the_steps_begin_at_their_totals(self) -> None:
        for total, percent in [(0, 0), (4999, 0), (5000, 5), (9999, 5), (10000, 10), (49999, 10), (50000, 20)]:
            self.assertEqual(best_discount(total), percent, total)

    def test_a_cart_of_exactly_fifty_is_discounted(self) -> None:
        cart = Cart()
        cart.add("kettle")
        self.assertEqual(cart.total(), 4750)

    def test_totals_are_rounded_down(self) -> None:
        cart = Cart()
        cart.add("kettle")
        cart.add("apple")
        self.assertEqual(cart.total(), 4797)


class Removing(unittest.TestCase):
    def test_some_stay(self) -> None:
        cart = Cart()
        cart.add("apple", 3)
        cart.remove("apple", 2)
        self.assertEqual(cart.counts, {"apple": 1})

    def test_the_last_one_takes_the_product_with_it(self) -> None:
        cart = Cart()
        cart.add("apple", 2)
        cart.remove("apple", 2)
        self.assertEqual(cart.counts, {})
        self.assertEqual(cart.total(), 0)

    def test_too_many_is_an_error_that_changes_nothing(self) -> None:
        cart = Cart()
        cart.add("apple", 2)
        with self.assertRaises(ValueError):
            cart.remove("apple", 3)
        self.assertEqual(cart.counts, {"apple": 2})

    def test_a_product_that_is_not_there_is_an_error(self) -> None:
        with self.assertRaises(ValueError):
            Cart().remove("apple")
