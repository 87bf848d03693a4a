"""The model name `tiny`: where a model folder is asked for, it names the policy that ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnstile_server.demo import TINY, model_folder
from turnstile_server.settings import load_settings


def test_tiny_names_the_policy_that_ships() -> None:
    assert load_settings({"model": Path("tiny")}).model == TINY
    assert (TINY / "model.safetensors").is_file()


def test_the_environment_and_a_settings_file_take_the_name_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "turnstile.toml"
    file.write_text('model = "tiny"\n')
    assert load_settings({}, file).model == TINY
    monkeypatch.setenv("TURNSTILE_MODEL", "tiny")
    assert load_settings({}).model == TINY


def test_a_folder_of_that_name_in_the_working_directory_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_folder(Path("tiny")) == TINY
    (tmp_path / "tiny").mkdir()
    assert model_folder(Path("tiny")) == Path("tiny")


def test_other_paths_stay_as_they_are() -> None:
    assert load_settings({"model": Path("/models/tiny")}).model == Path("/models/tiny")
    assert load_settings({}).model is None
