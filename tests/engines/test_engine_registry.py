"""An engine is one module and one line: the registry's engines, and a toy one that is added to them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from engines_support import collect, prompt_of

from turnstile_server.engines.protocol import EngineSampling
from turnstile_server.engines.registry import ENGINES, create_engine
from turnstile_server.errors import EngineRefused, StartupError
from turnstile_server.model_files import model_folder
from turnstile_server.settings import EngineSettings, Settings


@pytest.mark.parametrize("kind", ENGINES)
def test_each_name_stands_for_a_function_that_creates_an_engine(kind: str) -> None:
    module, _, function = ENGINES[kind].partition(":")
    assert callable(vars(import_module(module))[function])
    assert Settings(engine={"kind": kind}).engine.kind == kind


@pytest.mark.anyio
async def test_a_toy_engine_is_added_by_one_module_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "toy", "toy_engine:create")
    engine = create_engine(EngineSettings(kind="toy"), Path(), None)
    await engine.start()
    result = await collect(engine, prompt_of(1, 5), EngineSampling(max_new_tokens=3), rid="call-1")
    assert (result.ids.tolist(), result.finish.reason) == ([7, 7, 7], "length")
    with pytest.raises(EngineRefused, match="cannot be paused"):
        await engine.pause("abort")
    with pytest.raises(EngineRefused, match="cannot score"):
        await engine.score(prompt_of(1, 5), 1, 1.0)
    await engine.close()


def test_a_name_that_is_not_in_the_registry_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        StartupError, match="'toy': there is no such engine; take embedded, sglang, trainer, vllm, none"
    ):
        model_folder(Settings(engine={"kind": "toy"}))
