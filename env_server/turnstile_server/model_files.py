"""The model's folder: which one it is, and what the start and the engines need of its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Final

from turnstile_server.engines.registry import NO_ENGINE, check_kind, upstream_kind
from turnstile_server.engines.tokenizer_probe import TokenizerProbe, make_probe
from turnstile_server.errors import StartupError
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.settings import RenderingSettings, Settings

if TYPE_CHECKING:
    from turnstile_server.rendering.vocabulary import Vocabulary

MOST_PROBING_S: Final = 300.0
"""In which a chat template renders the conversations that are tried at start. The largest vocabularies take some
20 s."""


def model_folder(settings: Settings) -> Path | None:
    """The model folder, or the name of a hosted model; None for a server without a model. Raises StartupError when
    there is none."""
    check_kind(settings.engine.kind)
    if settings.engine.kind == NO_ENGINE:
        return None
    if upstream_kind(settings.engine.kind) is not None:
        if settings.model is None:
            raise StartupError("no model: --model NAME (TURNSTILE_MODEL) is the hosted model's name on its server")
        return settings.model
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


def load_renderer(
    model_dir: Path, settings: RenderingSettings, *, most_s: float = MOST_PROBING_S
) -> tuple[Vocabulary, Renderer]:
    """The folder's tokenizer and chat template. Raises StartupError where they cannot be used, and where the
    template still renders its first short conversations after ``most_s``."""
    # Imported here, in a thread and with a model only: transformers takes a second and more.
    from turnstile_server.rendering.template import TemplateRenderer  # noqa: PLC0415
    from turnstile_server.rendering.vocabulary import load_vocabulary  # noqa: PLC0415

    vocabulary = load_vocabulary(model_dir)
    made: Future[Renderer] = Future()

    def make() -> None:
        try:
            made.set_result(TemplateRenderer(vocabulary, settings))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            made.set_exception(error)

    # A daemon: the process ends although a template that loops never gives its thread back.
    Thread(target=make, name="chat template", daemon=True).start()
    try:
        return vocabulary, made.result(most_s)
    except TimeoutError:
        raise StartupError(
            f"the chat template of {model_dir} still renders short conversations after {most_s:.0f} s: it seems "
            "to loop for ever"
        ) from None


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
