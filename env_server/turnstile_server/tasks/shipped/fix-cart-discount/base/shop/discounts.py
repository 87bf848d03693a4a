"""Discounts by the total of an order."""

STEPS = [(50000, 20), (10000, 10), (5000, 5)]


def best_discount(total: int) -> int:
    """The discount, in percent, for a total in cents."""
    for least, percent in STEPS:
        if total > least:
            return percent
    return 0
