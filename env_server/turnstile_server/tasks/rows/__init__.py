"""Tasks of rows: JSONL, Parquet and ``datasets`` folders, streamed.

Read ``source`` first (what a SOURCE of this kind is, and how its rows become tasks), then ``options`` (the text of
a SOURCE), ``row_files`` (how rows are read), ``kinds`` (the data sets that are known, by entry points), ``values``
(cells to values), ``verified`` (rows that a resource server judges) and ``convert`` (a row to a task).
"""
