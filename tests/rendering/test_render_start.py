"""What cannot serve is refused at start, in words; what two folders share is told by a fingerprint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_templates import HERMES, LLAMA
from rendering_models import BASH, make_folder

from turnstile_server.errors import InvalidRequest, StartupError
from turnstile_server.rendering.factory import create_renderer, tokenizer_fingerprint
from turnstile_server.settings import RenderingSettings

pytestmark = pytest.mark.slow


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(StartupError) as caught:
        create_renderer(folder, RenderingSettings(**settings))
    return caught.value.message


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    assert "tokenizer.json is missing" in refusal(tmp_path)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "cannot be loaded" in refusal(tmp_path)


def test_a_tokenizer_without_a_chat_template_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = make_folder(tiny_model, tmp_path / "model", "x")
    (folder / "chat_template.jinja").unlink()
    assert "has no chat template" in refusal(folder)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('never') }}", "{{ messages[5].content + 1 }}", "{% if %}"]
)
def test_a_template_that_cannot_render_a_plain_conversation_is_refused(
    tiny_model: Path, tmp_path: Path, template: str
) -> None:
    assert "chat template" in refusal(make_folder(tiny_model, tmp_path / "model", template))


def test_a_folder_without_an_end_of_turn_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = make_folder(tiny_model, tmp_path / "model", "{{ messages[0].content }}")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert "end-of-turn" in refusal(folder)


def test_tools_with_no_known_call_format_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    plain = create_renderer(make_folder(tiny_model, tmp_path / "a", LLAMA), RenderingSettings())
    plain.check_tools([])
    with pytest.raises(InvalidRequest, match="call_format"):
        plain.check_tools([BASH])
    other = make_folder(tiny_model, tmp_path / "b", HERMES.replace("<tool_call>", "<call>"))
    with pytest.raises(InvalidRequest, match="no installed call format reads"):
        create_renderer(other, RenderingSettings()).check_tools([BASH])
    create_renderer(other, RenderingSettings(call_format="hermes")).check_tools([BASH])
    with pytest.raises(InvalidRequest):
        create_renderer(tiny_model, RenderingSettings(call_format="none")).check_tools([BASH])
    create_renderer(tiny_model, RenderingSettings()).check_tools([BASH])


def test_the_fingerprint_tells_tokenizers_apart(tiny_model: Path, other_tiny_model: Path, tmp_path: Path) -> None:
    assert tokenizer_fingerprint(tiny_model) == tokenizer_fingerprint(other_tiny_model)
    more = make_folder(tiny_model, tmp_path / "more", "x", added=["<|new|>"])
    assert tokenizer_fingerprint(tiny_model) != tokenizer_fingerprint(more)
    with pytest.raises(StartupError):
        tokenizer_fingerprint(tmp_path)


def test_equal_settings_give_equal_hashes(tiny_model: Path, tmp_path: Path) -> None:
    def digest(folder: Path, **settings: Any) -> str:
        return create_renderer(folder, RenderingSettings(**settings)).template_hash

    assert digest(tiny_model) == digest(tiny_model)
    other = [
        digest(tiny_model, thinking_history="template"),
        digest(tiny_model, template_kwargs={"enable_thinking": False}),
        digest(make_folder(tiny_model, tmp_path / "hermes", HERMES)),
    ]
    assert len({digest(tiny_model), *other}) == 4


@pytest.mark.slow
def test_a_renderer_does_not_load_torch(tiny_model: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from turnstile_server.rendering.factory import create_renderer\n"
        "from turnstile_server.settings import RenderingSettings\n"
        "create_renderer(Path(sys.argv[1]), RenderingSettings())\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_model)], check=True)


def test_a_template_that_loops_for_ever_is_told_and_the_process_ends(tiny_model: Path, tmp_path: Path) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    folder = make_folder(tiny_model, tmp_path / "model", loops + HERMES)
    program = (
        "import sys; from pathlib import Path; from turnstile_server.model_files import load_renderer\n"
        "from turnstile_server.settings import RenderingSettings\n"
        "load_renderer(Path(sys.argv[1]), RenderingSettings(), most_s=1)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    assert "it seems to loop for ever" in ended.stderr
