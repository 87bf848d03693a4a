"""Grammars as llguidance takes them (its Lark), from a JSON schema or from a structural tag. Pure.

Structural tags are XGrammar's, whose form SGLang and vLLM take too: the server writes one form for all engines.
Read here are those formats that the server writes: ``const_string``, ``json_schema``, ``regex``, ``any_text`` in
front of a text, ``token``, ``any_tokens``, ``sequence``, ``or`` and ``optional``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from math import lcm
from typing import Any, Final

import orjson

MOST_DEPTH: Final = 32
"""Formats inside each other."""

MOST_MULTIPLE: Final = 100_000
"""The least common multiple of a schema's ``multipleOf``, in units of its finest one: half a second of compiling
and 30 MB, in which both are linear."""

WHITE_SPACE: Final = r"[ ]?|\n[ ]{0,32}"
"""Between the tokens of JSON: compact, spaced and indented forms, and no endless white space, in which weak models
get lost."""


class NotSupported(ValueError):
    """The grammar cannot be expressed; the message says what of it."""


def json_schema_grammar(schema: str) -> str:
    """A JSON text that the schema takes, in any white space. Raises NotSupported."""
    return f"start: %json {_schema_text(_loaded(schema, 'json_schema'), {})}\n"


def structural_tag_grammar(tag: str) -> str:
    """What the tag's format takes. Raises NotSupported."""
    value = _loaded(tag, "structural_tag")
    if not isinstance(value, dict) or value.get("type") != "structural_tag" or "format" not in value:
        raise NotSupported("structural_tag must be an object of the type structural_tag with a format")
    return _Rules().grammar(value["format"])


class _Rules:
    """The rules of one grammar."""

    def __init__(self) -> None:
        self._rules: list[str] = []

    def grammar(self, form: Any) -> str:
        start = self._expression(form, 0)
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _expression(self, form: Any, depth: int) -> str:
        if not isinstance(form, dict) or depth > MOST_DEPTH:
            raise NotSupported("a format of the structural_tag is no object, or they are nested too deep")
        match form:
            case {"type": "const_string", "value": str(text)}:
                return json.dumps(text, ensure_ascii=False)
            case {"type": "json_schema", "json_schema": schema, **rest} if not rest:
                return f"%json {_schema_text(schema, _options(schema))}"
            case {"type": "regex", "pattern": str(pattern), **rest} if not rest:
                return self._rule(f"/{pattern.replace('/', chr(92) + '/')}/")
            case {"type": "token", "token": int(token)}:
                return f"<[{token}]>"
            case {"type": "any_tokens", "exclude_tokens": [*tokens], **rest} if tokens and not rest:
                return f"<[^{','.join(str(_id(token)) for token in tokens)}]>*"
            case {"type": "tag", "begin": str(begin), "content": {"type": "any_text"}, "end": str(end)} if end:
                text = self._rule(r"/(.|\n)*/", f"[suffix={json.dumps(end, ensure_ascii=False)}]")
                return f"{json.dumps(begin, ensure_ascii=False)} {text}" if begin else text
            case {"type": "sequence", "elements": [*elements]} if elements:
                return self._rule(" ".join(self._expression(element, depth + 1) for element in elements))
            case {"type": "or", "elements": [*elements]} if elements:
                return self._rule(" | ".join(self._expression(element, depth + 1) for element in elements))
            case {"type": "optional", "content": content}:
                return f"({self._expression(content, depth + 1)})?"
        raise NotSupported(f"the embedded engine does not read a structural_tag's format {str(form)[:100]}")

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name


def _id(token: Any) -> int:
    if type(token) is not int:
        raise NotSupported("a token of a structural_tag must be an id")
    return token


def _schema_text(schema: Any, options: dict[str, bool]) -> str:
    """The schema on one line, with the library's ``options``. An agent's own are left out: they would let keywords
    pass that the library does not know."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise NotSupported("a JSON schema must be an object")
    _check_multiples(schema)
    own = {"whitespace_pattern": WHITE_SPACE, **options}
    try:
        return json.dumps({**schema, "x-guidance": own}, ensure_ascii=False)
    except RecursionError:
        raise NotSupported("a JSON schema is nested too deep") from None


def _check_multiples(schema: dict[str, Any]) -> None:
    """The library holds ``multipleOf`` by one state for each remainder, also of several together."""
    exact = [Fraction(str(value)) for value in _multiples(schema)]
    unit, whole = lcm(*(one.denominator for one in exact)), 1
    for one in exact:
        whole = lcm(whole, int(one * unit))
        if whole > MOST_MULTIPLE:
            raise NotSupported(
                "multipleOf is too much: the least common multiple of all those of a schema may be "
                f"{MOST_MULTIPLE} at most, in units of the finest one"
            )


def _multiples(schema: Any) -> Iterator[int | float]:
    """The numbers under this name; those in an enumeration, too."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            found = value.get("multipleOf")
            if isinstance(found, int | float) and not isinstance(found, bool) and found > 0:
                yield found
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _options(schema: Any) -> dict[str, bool]:
    """The library's options that the server wrote into a schema: that of a tool is held as far as it can be."""
    found = schema.get("x-guidance") if isinstance(schema, dict) else None
    if not isinstance(found, dict):
        return {}
    return {name: True for name in ("lenient", "coerce_one_of") if found.get(name) is True}


def _loaded(text: str, name: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise NotSupported(f"{name} is not JSON: {error}") from error
