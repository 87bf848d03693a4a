"""SGLang's routed experts: strictly read, refused at start where they cannot come, and right on a real server."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from engines_support import probe_of
from gate_support import staged
from transformers import AutoModelForCausalLM

from local import tiny_model as make_tiny_model
from sglang_server import sglang_server
from turnstile.models import ExpertArray, Int32Array
from turnstile.models.samples_encoding import decode_samples
from turnstile_server.engines.protocol import CallOrigin, EngineCapabilities, EngineSampling, ExpertShape
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.engines.sglang.experts import ExpertRequest, check_experts, expert_request, read_shape
from turnstile_server.engines.sglang.generate import ReplyReader
from turnstile_server.errors import EngineProtocolError, EngineRefused, StartupError
from turnstile_server.settings import EngineSettings

SHAPE = ExpertShape(layers=2, top_k=2, experts=8)
ASKED = ExpertRequest(SHAPE, start=3, prompt=5)
URL = "http://engine"


def encoded(numbers: Any) -> str:
    return base64.b64encode(np.asarray(numbers, "<i4").tobytes()).decode()


def reply(experts: str | None, finish: dict[str, Any], tokens: int = 2) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": "r",
        "finish_reason": finish,
        "completion_tokens": tokens,
        "output_token_logprobs": [[-0.5, 7, None]] * tokens,
        "weight_versions": [{"version": "v", "start": 0, "end": tokens}],
    }
    if experts is not None:
        meta["routed_experts"] = experts
    return {"meta_info": meta}


STOP, ABORT = {"type": "stop"}, {"type": "abort", "message": "Aborted", "status_code": None}


def test_the_rows_are_those_from_the_asked_position_to_the_token_before_the_last() -> None:
    numbers = np.arange(12).reshape(3, 2, 2) % 8  # tokens 3, 4 of the prompt and the first sampled one
    chunk = ReplyReader("r", None, experts=ASKED).read(reply(encoded(numbers), STOP))
    assert chunk is not None
    assert chunk.finish is not None
    assert chunk.finish.routed_experts is not None
    assert chunk.finish.routed_experts.tolist() == numbers.tolist()
    assert chunk.finish.routed_experts.dtype == np.uint8
    assert ASKED.fields() == {"return_routed_experts": True, "routed_experts_start_len": 3}


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (None, "it has no routed_experts"),
        ("no base64!", "not base64"),
        (encoded([1, 2, 3])[:-4] + "AA==", "not base64 of int32|numbers for"),
        (encoded(np.zeros(8)), "8 numbers for 3 tokens of 2 layers and 2 experts"),
        (encoded(np.zeros(16)), "16 numbers for 3 tokens"),
        (encoded([0] * 11 + [8]), "outside the 8 of a layer"),
        (encoded([0] * 11 + [-1]), "outside the 8 of a layer"),
    ],
)
def test_anything_else_is_no_turn(experts: str | None, reason: str) -> None:
    with pytest.raises(EngineProtocolError, match=reason):
        ReplyReader("r", None, experts=ASKED).read(reply(experts, STOP))


def test_a_call_that_was_aborted_before_they_were_collected_has_none() -> None:
    chunk = ReplyReader("r", None, experts=ASKED).read(reply(None, ABORT))
    assert chunk is not None
    assert chunk.finish is not None
    assert chunk.finish.routed_experts is None


def test_an_engine_that_returns_none_refuses_a_call_that_asks() -> None:
    engine = EngineCapabilities(100, 10, "m")
    assert expert_request(engine, EngineSampling(max_new_tokens=1), 5) is None
    with pytest.raises(EngineRefused, match="does not return routed experts"):
        expert_request(engine, EngineSampling(max_new_tokens=1, experts_from=0), 5)


def folder_with(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"num_hidden_layers": 2, "num_experts_per_tok": 2, "num_local_experts": 8}, SHAPE),
        ({"text_config": {"num_hidden_layers": 2, "num_experts_per_tok": 2, "num_experts": 8}}, SHAPE),
        ({"num_hidden_layers": 2, "num_experts_per_tok": 2, "n_routed_experts": 8}, SHAPE),
        ({"num_hidden_layers": 2, "vocab_size": 10}, None),
    ],
)
def test_the_shape_is_read_from_the_model_folder(
    tmp_path: Path, config: dict[str, Any], shape: ExpertShape | None
) -> None:
    assert read_shape(folder_with(tmp_path / "m", config)) == shape
    assert read_shape(tmp_path / "nothing") is None


def test_an_engine_that_cannot_is_refused_at_start(tmp_path: Path) -> None:
    able = {"enable_return_routed_experts": True}
    moe = folder_with(tmp_path / "moe", {"num_hidden_layers": 2, "num_experts_per_tok": 2, "num_local_experts": 8})
    dense = folder_with(tmp_path / "dense", {"num_hidden_layers": 2})
    with pytest.raises(StartupError, match="start it with --enable-return-routed-experts"):
        check_experts(URL, {"enable_return_routed_experts": False}, (moe,), 4096, 1 << 20)
    with pytest.raises(StartupError, match="no mixture of experts"):
        check_experts(URL, able, (dense, None), 4096, 1 << 20)
    with pytest.raises(StartupError, match=r"more than engine\.max_reply_bytes"):
        check_experts(URL, able, (moe,), 4096, 1 << 16)
    assert check_experts(URL, able, (tmp_path / "elsewhere", moe), 4096, 1 << 20) == SHAPE


@pytest.fixture(scope="module")
def moe_model() -> Path:
    return make_tiny_model(1, "--experts=8")


@pytest.fixture(scope="module")
def moe_url(moe_model: Path) -> Iterator[str]:
    with sglang_server(moe_model, ("--enable-return-routed-experts",)) as url:
        yield url


def reference(model: Path, ids: Int32Array) -> ExpertArray:
    """[len, layers, top_k]: the experts that a plain forward pass of transformers routes each token to."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = network(input_ids=torch.tensor([ids.tolist()]), output_router_logits=True).router_logits
    layers = [layer.topk(2, dim=-1).indices.numpy() for layer in logits]
    return np.stack(layers, axis=1).astype(np.uint8)


@pytest.fixture
async def moe_engine(moe_url: str, moe_model: Path) -> AsyncIterator[SGLangEngine]:
    async with AsyncExitStack() as stack:
        settings = EngineSettings(kind="sglang", routed_experts=True)
        engine = SGLangEngine(moe_url, settings, expected_tokenizer=probe_of(moe_model))
        stack.push_async_callback(engine.close)
        await engine.start()
        yield engine


@pytest.mark.thorough
@pytest.mark.sglang
@pytest.mark.anyio
async def test_a_dialogue_has_the_experts_that_an_independent_forward_routes_to(
    moe_engine: SGLangEngine, moe_model: Path, tmp_path: Path
) -> None:
    """Through the gate, streamed and not: a root, its continuation, and a second answer to the same call."""
    assert moe_engine.capabilities.experts == SHAPE
    async with staged(moe_model, tmp_path, engine=moe_engine) as stage:
        episode = await stage.episode()
        messages: list[Any] = [{"role": "user", "content": "count to three"}]
        async with stage.agent(episode) as agent:
            for streamed in (False, True, False):
                if streamed:
                    text = ""
                    async for part in await agent.chat.completions.create(
                        model="m", max_tokens=30, messages=messages, stream=True
                    ):
                        text += (part.choices[0].delta.content or "") if part.choices else ""
                else:
                    answer = await agent.chat.completions.create(model="m", max_tokens=30, messages=messages)
                    text = answer.choices[0].message.content or ""
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
            await agent.chat.completions.create(model="m", max_tokens=10, messages=messages[:3])
        turns = (await stage.get(episode, "/turns"))["turns"]
        found = decode_samples((await stage.control.get(f"/episodes/{episode['episode_id']}/samples")).content)
    first, *later = turns
    assert len(first["routed_experts"]) == len(first["context_ids"]) + len(first["completion_ids"]) - 1
    for turn in later:  # only what is new, and the last token of the turn before
        assert len(turn["routed_experts"]) == len(turn["context_ids"]) + len(turn["completion_ids"])
    assert len(found.samples) == 2
    for sample in found.samples:
        assert sample.routed_experts is not None
        expected = reference(moe_model, sample.input_ids)[:-1]
        differ = (np.sort(sample.routed_experts) != np.sort(expected)).any(axis=-1)
        assert not differ.any(), f"{int(differ.sum())} of {differ.size} choices differ"


@pytest.mark.thorough
@pytest.mark.sglang
@pytest.mark.anyio
async def test_an_aborted_call_has_the_experts_of_its_tokens(
    moe_engine: SGLangEngine, moe_url: str, moe_model: Path
) -> None:
    prompt = np.arange(100, 130, dtype=np.int32)
    sampling = EngineSampling(max_new_tokens=2000, temperature=0.0, experts_from=0)
    ids: list[int] = []
    aborted = False
    async for chunk in moe_engine.generate(prompt, sampling, rid="ab", origin=CallOrigin("e"), stream=True):
        ids += chunk.ids.tolist()
        if len(ids) >= 20 and not aborted:
            aborted = True
            async with httpx.AsyncClient(base_url=moe_url, timeout=60) as raw:
                await raw.post("/abort_request", json={"rid": "ab"})
        finish = chunk.finish
    assert finish is not None
    assert finish.reason == "abort"
    assert finish.routed_experts is not None
    whole = np.concatenate([prompt, np.array(ids, np.int32)])
    assert (np.sort(finish.routed_experts) == np.sort(reference(moe_model, whole)[:-1])).all()
