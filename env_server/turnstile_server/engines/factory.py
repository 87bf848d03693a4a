"""Creates the engine that the settings name, from the registry."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from turnstile_server.engines.protocol import Engine, EngineContext
from turnstile_server.engines.registry import ENGINES, check_kind
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.errors import StartupError
from turnstile_server.settings import EngineSettings


def create_engine(settings: EngineSettings, model_dir: Path, expected_tokenizer: TokenizerProbe | None) -> Engine:
    """An engine that is not started yet. Raises StartupError when the settings lack what it needs."""
    check_kind(settings.kind)
    if settings.url is not None and not settings.url.startswith(("http://", "https://")):
        raise StartupError(f"--engine-url {settings.url!r} is no URL: it must begin with http:// or https://.")
    module, _, function = ENGINES[settings.kind].partition(":")
    create: Callable[[EngineContext], Engine] = vars(import_module(module))[function]
    return create(EngineContext(settings, model_dir, expected_tokenizer))
