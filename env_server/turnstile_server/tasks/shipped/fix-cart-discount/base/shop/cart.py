"""A cart: products and how many of each."""

from shop.catalog import PRICES
from shop.discounts import best_discount


class Cart:
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, product: str, count: int = 1) -> None:
        """Puts `count` more of a product in. Raises KeyError for a product that is not in the catalog."""
        PRICES[product]
        self.counts[product] = self.counts.get(product, 0) + count

    def remove(self, product: str, count: int = 1) -> None:
        """Takes `count` of a product out. Of the last one the product is gone from `counts`.

        Raises ValueError, and changes nothing, when there are fewer than `count` in the cart.
        """
        self.counts[product] -= count

    def total(self) -> int:
        """Price of everything in cents, after the discount, rounded down."""
        total = sum(PRICES[product] * count for product, count in self.counts.items())
        return total * (100 - best_discount(total)) // 100
