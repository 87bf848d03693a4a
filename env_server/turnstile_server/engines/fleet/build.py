"""From the settings to what the gate samples with and what the control API drives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from turnstile_server.engines.admin import EngineAdmin, LoneEngineAdmin
from turnstile_server.engines.fleet.completion import Decode
from turnstile_server.engines.fleet.fleet import Fleet
from turnstile_server.engines.protocol import Engine
from turnstile_server.engines.registry import create_engine
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.errors import StartupError
from turnstile_server.settings import Settings


@dataclass(frozen=True, slots=True)
class Engines:
    """``sampler``: what the gate samples with; not started. ``fleet``: the same where it is one."""

    sampler: Engine
    control: EngineAdmin
    versions: WeightVersions
    fleet: Fleet | None = None


def lone(engine: Engine) -> Engines:
    """One engine without a fleet."""
    versions = WeightVersions()
    return Engines(engine, LoneEngineAdmin(engine, versions), versions)


def build_engines(
    settings: Settings,
    model_dir: Path,
    probe: TokenizerProbe | None,
    decode: Decode,
    tell: Callable[[str], None] | None = None,
) -> Engines:
    """``tell`` is given the progress of an engine that is launched. Raises StartupError when the settings lack
    what the engine needs."""
    urls = settings.engine.urls
    if urls and settings.engine.url is not None:
        raise StartupError("engine.url and engine.urls are both set: name every engine in engine.urls")
    if len({url.rstrip("/") for url in urls}) != len(urls):
        raise StartupError("engine.urls names an engine twice")

    def engine_at(url: str | None) -> Engine:
        return create_engine(settings.engine.model_copy(update={"url": url, "urls": ()}), model_dir, probe)

    first: list[tuple[str | None, Engine]]
    if settings.launch.enabled:
        first = [
            (None, create_engine(settings.engine, model_dir, probe, settings.launch, tell, replica=replica))
            for replica in range(settings.launch.replicas)
        ]
    else:
        first = [(url, engine_at(url)) for url in urls or (settings.engine.url,)]
    if not first[0][1].pooled:
        return lone(first[0][1])
    versions = WeightVersions()
    fleet = Fleet(
        first,
        settings.engine,
        settings.fleet,
        versions,
        join=engine_at if first[0][0] is not None else None,
        decode=decode,
    )
    return Engines(fleet, fleet, versions, fleet)
