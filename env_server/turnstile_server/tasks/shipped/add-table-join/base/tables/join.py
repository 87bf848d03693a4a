"""Two tables to one."""

from __future__ import annotations

Row = dict[str, str]


def columns_of(first: list[Row], second: list[Row], on: str) -> list[str]:
    """The columns of the joined table: the first table's in its order, then the second's without `on`.

    A column other than `on` that both tables have is called `NAME_2` where it comes from the second. The
    columns of a table are those of its first row; an empty table has none.
    """
    raise NotImplementedError


def join(first: list[Row], second: list[Row], on: str, *, keep_left: bool = False) -> list[Row]:
    """One row for each pair of rows that have the same text in the column `on`, with `columns_of` as keys.

    Ordered as `first`, and for each of its rows as `second`. With `keep_left`, a row of `first` without a
    partner is there once, with "" in the second table's columns. Raises KeyError when a row of either table
    lacks the column `on`. Neither table is changed.
    """
    raise NotImplementedError
