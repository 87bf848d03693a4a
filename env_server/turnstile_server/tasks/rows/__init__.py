"""Tasks of rows: JSONL, Parquet and ``datasets`` folders, streamed.

Read ``source`` first (what a SOURCE of this kind is, and how its rows become tasks), then ``options`` (the text of
a SOURCE), ``files`` (how rows are read), ``kinds`` (the data sets that are known, as a table), ``values`` (cells
to values), ``scripts`` (the script of rows without one), ``verified`` (rows that a resource server judges),
``r2e`` (rows of R2E-Gym) and ``convert`` (a row to a task).
"""
