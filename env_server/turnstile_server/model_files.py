"""The model's folder: which one it is, and what the start and the engines need of its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from turnstile_server.engines.registry import NO_ENGINE, check_kind
from turnstile_server.engines.tokenizer_probe import TokenizerProbe, make_probe
from turnstile_server.errors import StartupError
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.settings import RenderingSettings, Settings

if TYPE_CHECKING:
    from turnstile_server.rendering.vocabulary import Vocabulary


def model_folder(settings: Settings) -> Path | None:
    """The model folder; None for a server without a model. Raises StartupError when there is none."""
    check_kind(settings.engine.kind)
    if settings.engine.kind == NO_ENGINE:
        return None
    if settings.model is None:
        raise StartupError(
            "no model: --model DIR (TURNSTILE_MODEL) names a Hugging Face folder with tokenizer and chat template"
        )
    if settings.model.is_dir() and not os.access(settings.model, os.R_OK | os.X_OK):
        raise StartupError(
            f"the model folder {settings.model} cannot be read by uid {os.geteuid()}, which runs the server. Run "
            f"`chmod -R a+rX {settings.model}` (for a container: on the folder that is mounted there)."
        )
    return settings.model


def load_renderer(model_dir: Path, settings: RenderingSettings) -> tuple[Vocabulary, Renderer]:
    # Imported here, in a thread and with a model only: transformers takes a second and more.
    from turnstile_server.rendering.factory import create_renderer  # noqa: PLC0415
    from turnstile_server.rendering.vocabulary import load_vocabulary  # noqa: PLC0415

    return load_vocabulary(model_dir), create_renderer(model_dir, settings)


def tokenizer_probe(vocabulary: Vocabulary) -> TokenizerProbe:
    def encode(text: str) -> list[int]:
        ids: list[int] = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return make_probe(encode, [token.text for token in vocabulary.control], vocabulary.size)


def decoder(vocabulary: Vocabulary) -> Callable[[Sequence[int]], str]:
    def decode(ids: Sequence[int]) -> str:
        text: str = vocabulary.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    return decode
