import unittest

from shop.cart import Cart


class CartTest(unittest.TestCase):
    def test_total_without_discount(self) -> None:
        cart = Cart()
        cart.add("apple", 3)
        cart.add("bread")
        self.assertEqual(cart.total(), 400)

    def test_total_with_discount(self) -> None:
        cart = Cart()
        cart.add("coffee", 6)
        self.assertEqual(cart.total(), 5700)


if __name__ == "__main__":
    unittest.main()
