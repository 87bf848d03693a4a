"""Model folders with the tiny tokenizer and another chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML_FAMILY, GLUES, HOISTS, LLAMA, ROLE_STOP
from rendering_models import LLAMA_TOKENS, ROLE_TOKENS, make_folder

from model_kits import Kits, cache_folder
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.template import TemplateRenderer
from turnstile_server.settings import RenderingSettings


@pytest.fixture(scope="session")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {name: make_folder(tiny_model, root / name, text) for name, text in CHATML_FAMILY.items()}
    made["tiny"] = tiny_model
    made["hoists"] = make_folder(tiny_model, root / "hoists", HOISTS)
    made["glues"] = make_folder(tiny_model, root / "glues", GLUES)
    made["role_stop"] = make_folder(
        tiny_model, root / "role_stop", ROLE_STOP, added=ROLE_TOKENS, eos="<|endoftext|>"
    )
    eos = json.loads((made["role_stop"] / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in eos}
    stops = [ids[text] for text in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    (made["role_stop"] / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    made["llama"] = make_folder(
        tiny_model, root / "llama", LLAMA, added=LLAMA_TOKENS, eos="<|eot_id|>", bos="<|begin_of_text|>"
    )
    return made


@pytest.fixture(scope="session")
def kit() -> Callable[[str], Path]:
    """The folder of a real model's template and tokens, by name (``scripts/model_kits.py``).

    Where its packages cannot be had the test fails, and says which: a skip would hide that nothing was proved."""
    return Kits(cache_folder()).make


@pytest.fixture(scope="session")
def renderer(folders: dict[str, Path]) -> Callable[..., TemplateRenderer]:
    """``renderer(name, **settings)``: a template renderer, made once per name and settings."""
    made: dict[str, TemplateRenderer] = {}

    def make(name: str, **settings: Any) -> TemplateRenderer:
        key = name + json.dumps(settings, sort_keys=True)
        if key not in made:
            built = create_renderer(folders[name], RenderingSettings(**settings))
            assert isinstance(built, TemplateRenderer)
            made[key] = built
        return made[key]

    return make
