"""Chooses and builds the renderer that the settings name."""

from __future__ import annotations

from pathlib import Path

from turnstile_server.rendering.protocol import Renderer
from turnstile_server.rendering.template import TemplateRenderer
from turnstile_server.rendering.vocabulary import load_vocabulary, tokenizer_fingerprint
from turnstile_server.settings import RenderingSettings

__all__ = ["create_renderer", "tokenizer_fingerprint"]


def create_renderer(model_dir: Path, settings: RenderingSettings) -> Renderer:
    """The renderer for a Hugging Face folder. Raises StartupError, saying what is missing and what to do."""
    vocabulary = load_vocabulary(model_dir)
    return TemplateRenderer(vocabulary, settings)
