"""Rows that a NeMo-Gym resource server verifies, as a task source: ``rows:PATH?verifier=URL&bounds=0,1``.

The address stands in this text alone, never in a mapping: see ``RowVerifier``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from turnstile_server.kinds.resource_server.options import server_address
from turnstile_server.kinds.resource_server.rows import RowVerifier, VerifiedRowReader
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.path_options import problems_of
from turnstile_server.tasks.protocol import Recognition, StoredTask, TaskProblem
from turnstile_server.tasks.reward import parse_bounds
from turnstile_server.tasks.rows.options import RowMapping, options_in, parse_options
from turnstile_server.tasks.rows.source import TaskRows, tasks_of_rows

OPTIONS: Final = ("verifier", "bounds")
_TAKEN = frozenset(("kind", "columns", "image", "workdir"))
"""Fields of a mapping that such rows take."""


class VerifiedRows:
    """A ``TaskSource``."""

    recognition = Recognition.OPTION

    def recognises(self, source: str) -> bool:
        return TaskRows().recognises(source) and not options_in(source).isdisjoint(OPTIONS)

    def host_paths(self, source: str) -> Sequence[Path]:
        return TaskRows().host_paths(source)

    def load(self, source: str, settings: TaskSettings) -> Iterator[StoredTask | TaskProblem]:
        try:
            options = parse_options(source, OPTIONS)
            reader = VerifiedRowReader(options.mapping, _verifier(options.mapping, **options.others))
        except ValueError as error:
            yield from problems_of(source, error)
            return
        yield from tasks_of_rows(source, options, reader, settings)


def _verifier(mapping: RowMapping, verifier: str | None = None, bounds: str | None = None) -> RowVerifier:
    """Raises ValueError: everything that is wrong, one thing per line."""
    if verifier is None:
        raise ValueError("bounds: they are for rows with a `verifier`")
    found, wrong = RowVerifier(verifier), []
    try:
        found = replace(found, url=server_address(verifier))
    except ValueError as error:
        wrong.append(f"verifier: {error}")
    try:
        found = found if bounds is None else replace(found, bounds=parse_bounds(bounds))
    except ValueError as error:
        wrong.append(f"bounds: {error}")
    wrong += _beside_a_verifier(mapping)
    if wrong:
        raise ValueError("\n".join(wrong))
    return found


def _beside_a_verifier(mapping: RowMapping) -> list[str]:
    """Fields of such a mapping that have no effect, one line each."""
    wrong = [
        f"{name}: it is not for rows that a `verifier` judges"
        for name in sorted(mapping.model_fields_set - _TAKEN)
    ]
    wrong += [
        f"columns: {ours}: rows that a `verifier` judges have only `id`"
        for ours in sorted({*mapping.columns} - {"id"})
    ]
    if mapping.kind not in (None, "nemo-gym"):
        wrong.append(f"kind: a `verifier` judges rows of nemo-gym, not of {mapping.kind!r}")
    return wrong
