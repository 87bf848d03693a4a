"""The text of a row source: ``rows:PATH?kind=swe-gym&where=repo=x/y&limit=100&split=test&map=mapping.yaml``.

Sources of other kinds may have options of their own behind ``rows:PATH?``, which ``parse_options`` leaves to them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnstile.models.faults import fault_text
from turnstile_server.tasks.parse import TaskSyntaxError, parse_yaml
from turnstile_server.tasks.selection import Condition

SCHEME = "rows:"
_LISTS = ("where",)
_TEXTS = ("kind", "split", "map", "image", "workdir", "test_cmd", "log_parser", "cut_ids", "timeout_s", "limit")


class RowMapping(BaseModel):
    """A data set's names of columns, and values that its rows lack. In a file it is YAML (``map=FILE``)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str | None = Field(None, description="The kind that the mapping changes.")
    columns: dict[str, str] = Field(
        default_factory=dict, description="Our field to the name of their column: `problem_statement: issue_text`."
    )
    image: str | None = Field(
        None, description="Template: `{column}`; `{column:TEXT}` is in lower case, TEXT for `__`."
    )
    workdir: str | None = Field(None, description="Template of the work folder: `/testbed`, `/{repo_name}`.")
    instruction: str | None = Field(None, description="Template of the instruction.")
    test_cmd: str | None = Field(
        None,
        description="Command of rows without a script, instead of their own (`{test_cmd}`); `{files}` are the "
        "test files.",
    )
    log_parser: str | None = Field(None, description="Log parser of rows that name none.")
    cut_ids: bool = Field(
        False, description="Cut the ids of tests at the first blank, where the log parser reads them so."
    )
    timeout_s: float | None = Field(None, gt=0, description="Time for the tests.")
    metadata: tuple[str, ...] = Field((), description="Further columns that `GET /tasks` shows.")

    def renamed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with our names beside theirs."""
        return {**row, **{ours: row[theirs] for ours, theirs in self.columns.items() if theirs in row}}


@dataclass(frozen=True, slots=True)
class RowOptions:
    """One SOURCE, read."""

    path: Path
    mapping: RowMapping
    where: tuple[Condition, ...] = ()
    limit: int | None = None
    split: str | None = None
    others: Mapping[str, str] = field(default_factory=dict)
    """Options of another kind of source."""


def map_file_of(source: str) -> Path | None:
    """The mapping's file that a source names, which need not exist; None: it names none."""
    found = dict(parse_qsl(source.partition("?")[2])).get("map")
    return None if found is None else Path(found)


def path_of(source: str) -> Path:
    return Path(source.removeprefix(SCHEME).partition("?")[0])


def options_in(source: str) -> set[str]:
    """The names of the options that a source has."""
    return {name for name, _ in parse_qsl(source.partition("?")[2], keep_blank_values=True)}


def parse_options(source: str, others: Collection[str] = ()) -> RowOptions:
    """``others``: names of options that are not those of rows. Raises ValueError: everything that is wrong, one
    thing per line."""
    query = source.partition("?")[2]
    given: dict[str, str] = {}
    where: list[Condition] = []
    wrong: list[str] = []
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "where":
            try:
                where.append(Condition.parse(value))
            except ValueError as error:
                wrong.append(f"where: {error}")
        elif name not in (*_TEXTS, *others):
            wrong.append(f"{name}: there is no such option; there are {', '.join((*_LISTS, *_TEXTS, *others))}")
        elif name in given:
            wrong.append(f"{name}: given twice")
        else:
            given[name] = value
    limit = given.pop("limit", None)
    if limit is not None and not (limit.isascii() and limit.isdigit() and int(limit) > 0):
        wrong.append(f"limit: {limit!r} is not a number from 1")
        limit = None
    split = given.pop("split", None)
    found = {name: given.pop(name) for name in others if name in given}
    map_file = Path(given.pop("map")) if "map" in given else None
    mapping = RowMapping()
    try:
        written = {} if map_file is None else _written(map_file)
        mapping = RowMapping.model_validate({**written, **given})
    except ValidationError as error:
        for item in error.errors(include_url=False):
            place = ".".join(map(str, item["loc"]))
            wrong.append(f"{place if map_file is None else f'{map_file}: {place}'}: {fault_text(item)}")
    except ValueError as error:
        wrong.append(f"map: {error}")
    if wrong:
        raise ValueError("\n".join(wrong))
    count = None if limit is None else int(limit)
    return RowOptions(path_of(source), mapping, tuple(where), count, split, found)


def _written(path: Path) -> dict[str, object]:
    try:
        (entry,) = parse_yaml(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8") from None
    except (TaskSyntaxError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from None
    except ValueError:
        raise ValueError(f"{path}: it is one mapping, not a list") from None
    if not isinstance(entry.value, dict):
        raise ValueError(f"{path}: it is a mapping of its fields")
    return entry.value
