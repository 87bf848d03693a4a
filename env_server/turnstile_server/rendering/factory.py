"""Builds the renderer of a model folder."""

from __future__ import annotations

from pathlib import Path

from turnstile_server.rendering.protocol import Renderer
from turnstile_server.rendering.template import TemplateRenderer
from turnstile_server.rendering.vocabulary import load_vocabulary, tokenizer_fingerprint
from turnstile_server.settings import RenderingSettings

__all__ = ["create_renderer", "tokenizer_fingerprint"]


def create_renderer(model_dir: Path, settings: RenderingSettings) -> Renderer:
    """The renderer for a Hugging Face model folder.

    Raises StartupError that says what is missing and what to do.
    """
    return TemplateRenderer(load_vocabulary(model_dir), settings)
