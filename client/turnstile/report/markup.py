"""HTML that cannot be broken by what it shows: text and attributes are escaped wherever they are put in.

What must hold: a plain string never becomes markup. It is made visible first (``turnstile.visible``), so that no
control character and no mark of direction reaches the page, and then escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

from turnstile.visible import visible


class Markup(str):
    """Text that is HTML already, made by this module's functions alone."""

    __slots__ = ()


Content: TypeAlias = "Markup | str | Iterable[Markup | str]"
Attribute: TypeAlias = "str | int | float | bool | None"

_EMPTY = frozenset({"meta", "br", "line", "polyline", "polygon", "rect", "circle"})
"""Elements without content. Those of SVG are closed by ``/>``, which HTML allows for the others."""


def tag(name: str, /, *content: Content, **attributes: Attribute) -> Markup:
    """An element. ``class_`` is the attribute ``class``, and ``aria_label`` is ``aria-label``; None and False
    leave an attribute out, True gives it no value."""
    head = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _EMPTY:
        return Markup(f"<{head}/>")
    return Markup(f"<{head}>{joined(*content)}</{name}>")


def joined(*content: Content) -> Markup:
    """The contents one after the other; plain strings are escaped, with their line ends and tabs."""
    parts = []
    for each in content:
        if isinstance(each, Markup):
            parts.append(each)
        elif isinstance(each, str):
            parts.append(Markup(escape(visible(each, lines=True), quote=False)))
        else:
            parts.append(joined(*each))
    return Markup("".join(parts))


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(visible(str(value)))}"'
