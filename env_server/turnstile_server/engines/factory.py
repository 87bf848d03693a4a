"""Which engine the settings ask for."""

from __future__ import annotations

from pathlib import Path

from turnstile_server.engines.embedded.engine import EmbeddedEngine
from turnstile_server.engines.protocol import Engine
from turnstile_server.engines.sglang import SGLangEngine
from turnstile_server.engines.sglang_start import read_vocab_size
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.engines.trainer import TrainerEngine
from turnstile_server.errors import StartupError
from turnstile_server.settings import EngineSettings


def create_engine(settings: EngineSettings, model_dir: Path, expected_tokenizer: TokenizerProbe | None) -> Engine:
    """An engine that is not started yet. Raises StartupError when the settings lack what it needs."""
    if settings.url is not None and not settings.url.startswith(("http://", "https://")):
        raise StartupError(f"--engine-url {settings.url!r} is no URL: it must begin with http:// or https://.")
    if settings.url is not None and settings.kind != "sglang":
        raise StartupError(f"--engine-url is for --engine sglang; --engine {settings.kind} needs no other server.")
    if settings.kind == "trainer":
        return TrainerEngine(model_dir, settings)
    if settings.kind == "embedded":
        return EmbeddedEngine(model_dir, settings, expected_tokenizer=expected_tokenizer)
    if settings.url is None:
        raise StartupError("--engine sglang needs --engine-url, the base URL of the running server.")
    return SGLangEngine(
        settings.url,
        settings,
        expected_tokenizer=expected_tokenizer,
        vocab_size=read_vocab_size(model_dir),
    )
