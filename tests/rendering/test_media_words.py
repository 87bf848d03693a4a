"""The words of a chat template for a picture that the model is not shown, where it has some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rendering_models import make_folder

from turnstile.models import Message
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.media_words import OMITTED
from turnstile_server.rendering.template import TemplateRenderer
from turnstile_server.settings import RenderingSettings

LISTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for item in message.content %}"
    "{% if item.type == 'text' %}{{ item.text }}{% else %}MEDIA{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that reads lists of parts, as GLM's and Qwen's do."""

GLM = "<reminder>You are unable to process this {{ item.type }} because you don't have multi-modal input ability. "
GLM += "Try different methods.</reminder>"
TEMPLATES = {
    "words": LISTS.replace("MEDIA", GLM),
    "nothing": LISTS.replace("MEDIA", ""),
    "a token": LISTS.replace("MEDIA", "Here is the picture that you see: <|im_start|>"),
    "a mark": LISTS.replace("MEDIA", "<image>"),
    "a refusal": LISTS.replace("MEDIA", "{{ raise_exception('text only') }}"),
    "no lists": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


@pytest.fixture(scope="module")
def renderer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TemplateRenderer]:
    root = tmp_path_factory.mktemp("media")

    def make(name: str) -> TemplateRenderer:
        folder = make_folder(tiny_model, root / name, TEMPLATES[name])
        built = create_renderer(folder, RenderingSettings())
        assert isinstance(built, TemplateRenderer)
        return built

    return make


def test_the_words_of_the_template_are_taken(renderer: Callable[[str], TemplateRenderer]) -> None:
    made = renderer("words")
    said = "<reminder>You are unable to process this {} because you don't have multi-modal input ability. "
    said += "Try different methods.</reminder>"
    assert made.media_words == {kind: said.format(kind) for kind in OMITTED}
    # As content they are the tokens that the template itself would have written.
    rendered = made.render([Message("user", f"see {made.media_words['image']}")], [])
    assert "see <reminder>You are unable to process this image because" in made.decode(rendered.ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "words"])
def test_a_template_without_a_sentence_has_no_words(
    renderer: Callable[[str], TemplateRenderer], name: str
) -> None:
    assert renderer(name).media_words == OMITTED
