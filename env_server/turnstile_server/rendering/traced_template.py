"""Runs a chat template on traced texts (``traced_text``).

The template is compiled in the environment in which ``transformers`` compiles it, except for what would look
inside a text: joining and writing out keep traced texts as they are, and every filter and test that is given one
is refused, unless this module says what it does with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from turnstile_server.rendering.traced_text import (
    VOLATILE,
    Hole,
    TextStep,
    Trace,
    TracedText,
    Untraceable,
    as_text,
    joined,
)

Stock = dict[str, Any]

_TESTS: dict[str, bool] = {
    "string": True,
    "defined": True,
    "iterable": True,
    "sequence": True,
    "undefined": False,
    "none": False,
    "mapping": False,
    "number": False,
    "integer": False,
    "float": False,
    "boolean": False,
    "true": False,
    "false": False,
    "callable": False,
}
"""The answers of these tests for every string."""


class TracedTemplate:
    """A chat template that takes traced texts. Immutable, safe to use from several threads."""

    def __init__(self, source: str, options: Mapping[str, Any]) -> None:
        """``options``: the template's other variables."""
        environment = _compile_jinja_template(source).environment.overlay()
        tojson = environment.filters["tojson"]
        environment.concat = joined
        environment.filters = {name: _refusing(one) for name, one in environment.filters.items()}
        environment.filters |= {
            "random": _refuse,
            "trim": _either(environment.filters["trim"], lambda text, chars=None: text.strip(chars)),
            "string": _either(environment.filters["string"], lambda text: text),
            "tojson": _either(
                environment.filters["tojson"], lambda text, **options: text.then(_json_step(tojson, options))
            ),
            **{name: _either(environment.filters[name], len) for name in ("length", "count")},
            **{name: _either(environment.filters[name], _default) for name in ("default", "d")},
        }
        environment.tests = {
            name: _either(one, functools.partial(_constant, _TESTS[name])) if name in _TESTS else _refusing(one)
            for name, one in environment.tests.items()
        }
        environment.tests |= {name: lambda one, other: one == other for name in ("eq", "==", "equalto")}
        environment.tests |= {name: lambda one, other: one != other for name in ("ne", "!=")}
        environment.globals = environment.globals | {"lipsum": _refuse}
        self._template = environment.from_string(source)
        # The compiled code finds these two names in its module.
        module = self._template.root_render_func.__globals__
        module["str"] = as_text
        module["str_join"] = lambda parts: joined(map(as_text, parts))
        self._options = dict(options)

    def pieces(self, trace: Trace, messages: Sequence[Stock], *, prompt: bool) -> tuple[str | Hole, ...]:
        """The rendered text without tools, in pieces. Raises Untraceable where the run cannot be noted, and where
        the template fails or refuses the messages."""
        variables = {
            "strftime_now": lambda _: TracedText(trace, (Hole(VOLATILE),)),
            **self._options,
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": prompt,
        }
        try:
            rendered = joined(self._template.root_render_func(self._template.new_context(variables)))
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise Untraceable(f"the template failed: {error}") from error
        return rendered.pieces if isinstance(rendered, TracedText) else (rendered,)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise Untraceable("a text was given to a function that may look at it")


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which must not be given a traced text."""

    @functools.wraps(function)
    def refusing(*arguments: Any, **options: Any) -> Any:
        if any(isinstance(value, TracedText) for value in (*arguments, *options.values())):
            _refuse()
        return function(*arguments, **options)

    return refusing


def _either(function: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    """``traced`` for a traced text, ``function`` for everything else."""

    @functools.wraps(function)
    def either(value: Any, *arguments: Any, **options: Any) -> Any:
        return (traced if isinstance(value, TracedText) else function)(value, *arguments, **options)

    return either


def _constant(answer: bool, _: TracedText) -> bool:
    return answer


def _default(text: TracedText, default_value: Any = "", boolean: bool = False) -> Any:
    return default_value if boolean and not text else text


def _json_step(tojson: Callable[..., str], options: Mapping[str, Any]) -> TextStep:
    if not all(value is None or isinstance(value, bool | int | str) for value in options.values()):
        _refuse()
    return TextStep(tojson, (), tuple(sorted(options.items())))
