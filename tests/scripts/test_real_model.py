"""The folder of a real small model: made from the package, and served by the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest

import real_model
from turnstile_server.engines.embedded.model import LoadedModel, load_tokenizer


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        real_model.main([str(tmp_path)])
    assert caught.value.code == 2
    assert f"{tmp_path} exists" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        real_model.main([str(tmp_path / "out"), "--gguf", str(tmp_path / "none.gguf")])
    assert "none.gguf: there is no such file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_package_becomes_a_folder_that_the_embedded_engine_serves(tmp_path: Path) -> None:
    out = tmp_path / "smollm2"
    real_model.main([str(out)])
    model = LoadedModel(out, "v")
    model.check_cache()
    assert (model.vocab_size, model.window) == (49_152, 8_192)
    tokenizer = load_tokenizer(out)
    said = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    sampled = model._model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(sampled[0, prompt["input_ids"].shape[1] :])
