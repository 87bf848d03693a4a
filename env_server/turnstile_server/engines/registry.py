"""Every engine by the name that ``engine.kind`` and ``--engine`` take. An engine is added by one line here.

A name stands for ``module:function``. The function takes an ``EngineContext`` and returns an ``Engine`` that is
not started yet. The module is imported when it is chosen, because an engine's libraries may be large or optional.
For the same reason this module imports no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from turnstile_server.engines.protocol import Engine, EngineContext
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.errors import StartupError
from turnstile_server.settings import EngineSettings, LaunchSettings

ENGINES: Final[dict[str, str]] = {
    "embedded": "turnstile_server.engines.embedded.engine:create",
    "sglang": "turnstile_server.engines.sglang.engine:create",
    "trainer": "turnstile_server.engines.trainer:create",
    "vllm": "turnstile_server.engines.vllm.engine:create",
}

LAUNCHED: Final = "turnstile_server.engines.launch.launched:create"
"""Puts a process of our own below an engine's client, for ``--launch``."""

NO_ENGINE: Final = "none"
"""The kind of a server without a model: it answers ``/health`` and refuses everything else."""


def engine_kinds() -> tuple[str, ...]:
    """The values that ``engine.kind`` takes."""
    return (*ENGINES, NO_ENGINE)


def check_kind(kind: str) -> None:
    """Raises StartupError, naming the kinds there are, for any other name."""
    if kind not in engine_kinds():
        raise StartupError(f"engine.kind is {kind!r}: there is no such engine; take {', '.join(engine_kinds())}")


def create_engine(
    settings: EngineSettings,
    model_dir: Path,
    expected_tokenizer: TokenizerProbe | None,
    launch: LaunchSettings | None = None,
    tell: Callable[[str], None] | None = None,
    *,
    replica: int = 0,
) -> Engine:
    """An engine that is not started yet. Raises StartupError when the settings lack what it needs.

    ``launch``: whether its process is to be ours. ``tell`` is given the progress of such a start.
    ``replica``: which of ``launch.replicas`` it is.
    """
    check_kind(settings.kind)
    if settings.url is not None and not settings.url.startswith(("http://", "https://")):
        raise StartupError(f"--engine-url {settings.url!r} is no URL: it must begin with http:// or https://.")
    create: Callable[[EngineContext], Engine] = _function(ENGINES[settings.kind])
    context = EngineContext(settings, model_dir, expected_tokenizer)
    if launch is not None and launch.enabled:
        launched: Engine = _function(LAUNCHED)(context, launch, create, tell, replica)
        return launched
    return create(context)


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return vars(import_module(module))[function]
