"""Parses the text of task files: YAML and JSONL to plain values, with the line of each value.

What must hold: every value is one that JSON could hold (text, numbers, true, false, null, lists, mappings by
text), so a task means the same in both formats. YAML is read as JSON would be: only ``true`` and ``false`` are
booleans, dates stay text, a key given twice is an error, and there are no aliases, which can make a small file a
huge value.

This module opens no file and does not know what a task is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn

import yaml

Loc = tuple[str | int, ...]

MAX_DEPTH = 100
"""Levels of lists and mappings in a task file."""
_NOT_FINITE = "{:.100} is no finite number"
_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda _: None,
    "bool": lambda text: text == "true",
    "int": int,
    "float": float,
    "str": str,
}


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """One task's values and their lines."""

    value: Any
    line: int
    lines: Mapping[Loc, int]
    """Line by path in ``value``. A path that is missing has the line of its longest known prefix."""

    def line_of(self, loc: Loc) -> int:
        for length in range(len(loc), 0, -1):
            if loc[:length] in self.lines:
                return self.lines[loc[:length]]
        return self.line


class TaskSyntaxError(ValueError):
    """The text itself cannot be read. ``line`` is 1-based; ``loc``: the path of a value that is at fault."""

    def __init__(self, message: str, line: int | None, loc: Loc = ()) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.loc = loc


_BASE = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""libyaml reads tasks several times as fast as the parser in Python, at each start of a server."""


class _JsonLikeLoader(_BASE):  # type: ignore[misc, valid-type] # which of the two is known at run time
    """YAML with JSON's types."""


_JsonLikeLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"null|~|", "n~\0"),
    ("bool", r"true|false", "tf"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    _JsonLikeLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first]
    )


def parse_yaml(text: str) -> list[TaskEntry]:
    """The tasks of a YAML file: one mapping, or a list of them. Raises TaskSyntaxError."""
    try:
        _refuse_aliases_and_depth(text)
        root: yaml.Node | None = yaml.compose(text, _JsonLikeLoader)
        if root is None:
            raise TaskSyntaxError("the file is empty", 1)
        if not isinstance(root, yaml.SequenceNode):
            return [_yaml_entry(root)]
        if not root.value:
            raise TaskSyntaxError("the list is empty", root.start_mark.line + 1)
        return [_yaml_entry(node) for node in root.value]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise TaskSyntaxError(
            f"not YAML: {error.problem or error.context}", mark.line + 1 if mark else None
        ) from None
    except yaml.YAMLError as error:
        raise TaskSyntaxError(f"not YAML: {error}", None) from None


def _refuse_aliases_and_depth(text: str) -> None:
    """Runs before anything is composed: libyaml's composer follows aliases, and recurses in C without a limit."""
    depth = 0
    for event in yaml.parse(text, _BASE):
        line = None if event.start_mark is None else event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise TaskSyntaxError("aliases (`*name`) are not supported", line)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise TaskSyntaxError(f"not YAML that can be read: nested too deep (over {MAX_DEPTH} levels)", line)


def _yaml_entry(node: yaml.Node) -> TaskEntry:
    lines: dict[Loc, int] = {}
    return TaskEntry(_yaml_value(node, (), lines), node.start_mark.line + 1, lines)


def _yaml_value(node: yaml.Node, loc: Loc, lines: dict[Loc, int]) -> Any:
    line = node.start_mark.line + 1
    lines.setdefault(loc, line)
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise TaskSyntaxError("a key must be text", key_node.start_mark.line + 1)
            key = key_node.value
            if key in mapping:
                raise TaskSyntaxError(f"the key {key!r} is given twice", key_node.start_mark.line + 1)
            lines[(*loc, key)] = key_node.start_mark.line + 1
            mapping[key] = _yaml_value(value_node, (*loc, key), lines)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_yaml_value(item, (*loc, index), lines) for index, item in enumerate(node.value)]
    return _yaml_scalar(node, loc)


def _yaml_scalar(node: yaml.Node, loc: Loc) -> Any:
    line = node.start_mark.line + 1
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind not in _SCALARS:
        raise TaskSyntaxError(f"the tag {kind!r} is not supported", line)
    try:
        value = _SCALARS[kind](node.value)
    except ValueError:  # named by a tag (`!!int x`), or of thousands of digits
        raise TaskSyntaxError(f"{node.value:.100} is no {kind} that can be read", line) from None
    if isinstance(value, float) and not isfinite(value):
        raise TaskSyntaxError(_NOT_FINITE.format(node.value), line, loc)
    return value


def parse_jsonl(text: str) -> Iterator[TaskEntry | TaskSyntaxError]:
    """The tasks of a JSONL file, one per line that is not blank; a line that is not JSON is its error."""
    # Not splitlines(): JSON strings may hold U+2028 and the like.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield TaskEntry(parse_json(line, number), number, {})
        except TaskSyntaxError as error:
            yield error


def parse_json(text: str, line: int | None) -> Any:
    """One value, at ``line`` of its file. Raises TaskSyntaxError."""
    too_large: list[str] = []

    def number(digits: str) -> float:
        found = float(digits)
        if not isfinite(found):
            too_large.append(digits)
        return found

    try:
        value = json.loads(text, object_pairs_hook=_no_twins, parse_constant=_no_constant, parse_float=number)
    except json.JSONDecodeError as error:
        raise TaskSyntaxError(f"not JSON: {error.msg} (column {error.colno})", line) from None
    except (ValueError, RecursionError) as error:
        raise TaskSyntaxError(f"not JSON that can be read: {error}", line) from None
    if too_large:
        raise TaskSyntaxError(_NOT_FINITE.format(too_large[0]), line, _not_finite(value))
    if _is_deep(value):
        raise TaskSyntaxError(f"not JSON that can be read: nested too deep (over {MAX_DEPTH} levels)", line)
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (
            each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)
        )
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _not_finite(value: Any) -> Loc:
    """The path of the first number that is not finite; there is one."""
    pending: list[tuple[Loc, Any]] = [((), value)]
    while pending:
        loc, found = pending.pop()
        if isinstance(found, float) and not isfinite(found):
            return loc
        inner = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
        pending += reversed([((*loc, key), each) for key, each in inner])
    return ()


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} is given twice")
            seen.add(key)
    return mapping


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
