"""Model kits: folders of real open models' templates and tokens, made of published packages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from model_kits import KitError, Kits, families

pytestmark = pytest.mark.thorough

Kit = Callable[[str], Path]


@pytest.mark.parametrize("name", ["glm-4.7", "kimi-k2", "trl-glm4moe_training"])
def test_a_kit_has_the_models_control_tokens_and_ends(kit: Kit, name: str) -> None:
    folder = kit(name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    marker = "<|user|>" if "glm" in name else "<|im_user|>"
    assert marker in (folder / "chat_template.jinja").read_text()
    assert tokenizer.encode(marker, add_special_tokens=False).tokens == [marker]
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    end = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
    assert tokenizer.id_to_token(ends[0]) == end
    text = " def f():\n\treturn 'größer'"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_a_folder_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "glm-4.7").mkdir()
    assert list(Kits(tmp_path).make("glm-4.7").iterdir()) == []


def test_packages_that_cannot_be_had_are_named_and_no_folder_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        KitError, match=r"(?s)pip cannot fetch llama-cpp-python==0\.3\.36.*No matching distribution"
    ):
        Kits(tmp_path).make("glm-4.7")
    assert [each.name for each in tmp_path.iterdir()] == [".packages"]


def test_a_name_that_is_no_family_is_refused(kit: Kit) -> None:
    with pytest.raises(KitError, match=r"no model kit glm-9.*glm-4\.7"):
        kit("glm-9")


def test_a_family_names_each_control_token_once() -> None:
    known = families()
    assert len(known) == 57
    for family in known.values():
        texts = [text for text, _ in family.markers]
        assert len(texts) == len(set(texts))
