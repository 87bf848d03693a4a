"""Two tables to one."""

from __future__ import annotations

Row = dict[str, str]


def columns_of(first: list[Row], second: list[Row], on: str) -> list[str]:
    """The columns of the joined table: the first table's in its order, then the second's without `on`.

    A column other than `on` that both tables have is called `NAME_2` where it comes from the second. The
    columns of a table are those of its first row; an empty table has none.
    """
    return [*(first[0] if first else ()), *_names(first, second, on).values()]


def _names(first: list[Row], second: list[Row], on: str) -> dict[str, str]:
    """The second table's columns without `on`, and what they are called in the joined table."""
    taken = set(first[0]) if first else set()
    columns = [name for name in (second[0] if second else ()) if name != on]
    return {name: f"{name}_2" if name in taken else name for name in columns}


def join(first: list[Row], second: list[Row], on: str, *, keep_left: bool = False) -> list[Row]:
    """One row for each pair of rows that have the same text in the column `on`, with `columns_of` as keys.

    Ordered as `first`, and for each of its rows as `second`. With `keep_left`, a row of `first` without a
    partner is there once, with "" in the second table's columns. Raises KeyError when a row of either table
    lacks the column `on`. Neither table is changed.
    """
    names = _names(first, second, on)
    partners: dict[str, list[Row]] = {}
    for row in second:
        partners.setdefault(row[on], []).append(row)
    nobody = [dict.fromkeys(names, "")] if keep_left else []
    return [
        {**row, **{new: partner[old] for old, new in names.items()}}
        for row in first
        for partner in partners.get(row[on], nobody)
    ]
