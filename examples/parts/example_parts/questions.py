"""A kind of row: ``question`` and ``reference``, as data sets of questions have them."""

from __future__ import annotations

from turnstile_server.tasks.rows.kinds import RowFields
from turnstile_server.tasks.rows.options import RowMapping
from turnstile_server.tasks.rows.row_files import Row
from turnstile_server.tasks.rows.values import RowFault


class Questions:
    name = "questions"
    marks = frozenset({"question", "reference"})
    without: frozenset[str] = frozenset()

    def read(self, row: Row, number: int, mapping: RowMapping) -> RowFields | list[RowFault]:
        if not isinstance(row["reference"], str):
            return [("reference", "it is not text")]
        answer = {"value": row["reference"]}
        fields = {"id": f"question-{number}", "instruction": row["question"], "answer": answer}
        return RowFields(fields, {"instruction": "question"})


ROWS = (Questions(),)
