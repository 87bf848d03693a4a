"""Builds the renderer that ``settings.rendering`` names."""

from __future__ import annotations

from pathlib import Path

from turnstile_server.errors import StartupError
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.rendering.template import TemplateRenderer
from turnstile_server.rendering.vocabulary import load_vocabulary, tokenizer_fingerprint
from turnstile_server.settings import RenderingSettings

__all__ = ["create_renderer", "tokenizer_fingerprint"]


def create_renderer(model_dir: Path, settings: RenderingSettings) -> Renderer:
    """The renderer for a Hugging Face model folder.

    Raises StartupError that says what is missing and what to do.
    """
    vocabulary = load_vocabulary(model_dir)
    if settings.backend != "renderers":
        return TemplateRenderer(vocabulary, settings)
    # The package takes over a second to import, and only this backend needs it.
    try:
        from turnstile_server.rendering.family import FamilyRenderer  # noqa: PLC0415
    except ImportError as error:
        raise StartupError(f"rendering.backend = renderers: the package cannot be imported: {error}") from error
    return FamilyRenderer(vocabulary, settings)
