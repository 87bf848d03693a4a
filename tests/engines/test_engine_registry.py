"""The registry's engines, and a toy one of a module that no package declares."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines_support import collect, prompt_of

from turnstile_server.engines.protocol import Engine, EngineContext, EngineSampling, UpstreamKind
from turnstile_server.engines.registry import ENGINES, create_engine
from turnstile_server.errors import EngineRefused, StartupError
from turnstile_server.model_files import model_folder
from turnstile_server.settings import EngineSettings, Settings


@pytest.mark.parametrize("kind", ENGINES.names())
def test_each_name_stands_for_a_function_that_creates_an_engine(kind: str) -> None:
    made = ENGINES.load(kind)
    assert callable(made.create if isinstance(made, UpstreamKind) else made)
    assert Settings(engine={"kind": kind}).engine.kind == kind


@pytest.mark.anyio
async def test_an_engine_of_any_module_is_named_by_its_place() -> None:
    engine = create_engine(EngineSettings(kind="toy_engine:create"), Path(), None)
    await engine.start()
    result = await collect(engine, prompt_of(1, 5), EngineSampling(max_new_tokens=3), rid="call-1")
    assert (result.ids.tolist(), result.finish.reason) == ([7, 7, 7], "length")
    with pytest.raises(EngineRefused, match="cannot be paused"):
        await engine.pause("abort")
    with pytest.raises(EngineRefused, match="cannot score"):
        await engine.score(prompt_of(1, 5), 1, 1.0)
    await engine.close()


def fails(context: EngineContext) -> Engine:
    raise ZeroDivisionError("no licence")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("absent_module:create", "ModuleNotFoundError: No module named 'absent_module'"),
        (f"{__name__}:fails", "cannot be made: ZeroDivisionError: no licence"),
        ("pathlib:Path.cwd", "cannot be made: TypeError"),
        ("builtins:str", "it makes a str, which does not derive from Engine"),
    ],
)
def test_an_engine_that_cannot_be_used_is_told_by_its_place_before_anything_starts(kind: str, said: str) -> None:
    with pytest.raises(StartupError, match=said) as failed:
        create_engine(EngineSettings(kind=kind), Path(), None)
    assert f"engine.kind: the engine {kind} " in failed.value.message


def test_a_name_that_is_not_in_the_registry_is_refused_with_those_that_are() -> None:
    with pytest.raises(StartupError, match="there are embedded, sglang, trainer, upstream, vllm"):
        model_folder(Settings(engine={"kind": "toy"}))
