"""``encode_completion``: what the policy would have sampled to write a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.settings import RenderingSettings

CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'
END = "<|im_end|>"


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> Renderer:
    return create_renderer(tiny_model, RenderingSettings())


@pytest.mark.parametrize("text", ["", "Hello there.", CALL, "Grüße 東京 🙂", f"half <tool_call> {CALL}"])
def test_it_is_the_inverse_of_decode_and_closes_the_turn(renderer: Renderer, text: str) -> None:
    closed = renderer.encode_completion(text)
    assert closed[-1] in renderer.stop_token_ids
    assert renderer.decode(closed) == text + END
    assert renderer.encode_completion(text, close=False).tolist() == closed[:-1].tolist()


def test_a_text_that_is_closed_already_is_not_closed_again(renderer: Renderer) -> None:
    assert renderer.encode_completion(f"Done.{END}").tolist() == renderer.encode_completion("Done.").tolist()


def test_text_of_control_tokens_is_control_here(renderer: Renderer) -> None:
    """The policy's own output, unlike content: one token each."""
    assert len(renderer.encode_completion("<tool_call>", close=False)) == 1


def test_a_lone_surrogate_becomes_the_replacement_character(renderer: Renderer) -> None:
    assert renderer.decode(renderer.encode_completion("a\ud800b")) == f"a\ufffdb{END}"
