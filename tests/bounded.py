"""Settings with other bounds: constants of ``turnstile_server.*.bounds``, given by their names beside settings.

``bounded(GateSettings, max_calls=2, trim_s=0.1)`` is a section whose readers find another ``trim_s``, and
``bounded_settings(gate={"trim_s": 0.1})`` the settings of a whole server. A name of neither kind is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from turnstile_server.settings import BoundedSection, Bounds, Settings
from turnstile_server.settings.moved import CONSTANTS, bounds_class

SectionT = TypeVar("SectionT", bound=BoundedSection)


def bounded(kind: type[SectionT], /, **given: Any) -> SectionT:
    """The section ``kind`` of the settings and bounds ``given``."""
    return kind(**_split(_name_of(kind), kind, given))


def rebounded(section: SectionT, /, **given: Any) -> SectionT:
    """A copy of ``section`` with the settings and bounds ``given``; its other bounds stay."""
    kind = type(section)
    return section.model_copy(update=_split(_name_of(kind), kind, {"bounds": section.bounds, **given}))


def bounded_settings(**given: Any) -> Settings:
    """All settings; each section is an instance, or a mapping of settings and bounds."""
    return Settings(**split_sections(given))


def split_sections(given: Mapping[str, Any]) -> dict[str, Any]:
    """``given``, nested like the settings' file, with bounds where ``Settings`` takes them."""
    split = dict(given)
    for name, field in Settings.model_fields.items():
        kind, values = field.annotation, given.get(name)
        if isinstance(kind, type) and issubclass(kind, BoundedSection) and isinstance(values, Mapping):
            split[name] = _split(name, kind, values)
    return split


def _name_of(kind: type[BoundedSection]) -> str:
    return next(name for name, field in Settings.model_fields.items() if field.annotation is kind)


def _split(section: str, kind: type[BoundedSection], given: Mapping[str, Any]) -> dict[str, Any]:
    places = {place for name, place in CONSTANTS.items() if name.partition(".")[0] == section}
    parts: dict[type[Bounds], Bounds] = {type(part): part for part in given.get("bounds", ())}
    settings = {name: value for name, value in given.items() if name != "bounds"}
    for part in map(bounds_class, places):
        names = {field.name for field in fields(part)} - kind.model_fields.keys()
        if changes := {name: settings[name] for name in names & settings.keys()}:
            parts[part] = replace(parts.get(part) or part(), **changes)
    constants = {field.name for part in parts for field in fields(part)} - kind.model_fields.keys()
    return {
        **{name: value for name, value in settings.items() if name not in constants},
        "bounds": tuple(parts.values()),
    }
