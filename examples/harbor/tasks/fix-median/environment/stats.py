"""Small statistics."""


def median(values):
    if not values:
        raise ValueError("median of nothing")
    values.sort()
    return values[len(values) // 2]
