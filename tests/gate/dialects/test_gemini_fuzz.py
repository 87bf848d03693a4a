"""Any JSON is a call or a refusal that names a reason, never a fault; and a history known from before changes
neither."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from conversation import raw, reply_ids, turns
from gate_support import says, staged
from hypothesis import given
from hypothesis import strategies as st
from mutations import STRANGE, mutated

from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.base import BodyContext, ModelRequest
from turnstile_server.gate.dialects.gemini import GeminiDialect
from turnstile_server.gate.dialects.parse_cache import ParseCache

GEMINI = GeminiDialect()
METHODS = ("generateContent", "streamGenerateContent", "countTokens")
VALID: dict[str, Any] = {
    "contents": [
        {"role": "user", "parts": [{"text": "u"}]},
        {
            "role": "model",
            "parts": [
                {"text": "r", "thought": True, "thoughtSignature": "eA=="},
                {"text": "a"},
                {"functionCall": {"id": "c", "name": "bash", "args": {"command": "ls", "n": 1}}},
            ],
        },
        {"role": "user", "parts": [{"functionResponse": {"name": "bash", "response": {"output": "x"}}}]},
        {"role": "function", "parts": [{"function_response": {"name": "bash", "response": {"code": 0}}}]},
    ],
    "systemInstruction": {"role": "user", "parts": [{"text": "s"}]},
    "tools": [
        {
            "functionDeclarations": [
                {
                    "name": "bash",
                    "description": "d",
                    "parameters": {
                        "type": "OBJECT",
                        "properties": {"command": {"type": "STRING", "nullable": True, "enum": ["ls"]}},
                        "required": ["command"],
                        "propertyOrdering": ["command"],
                    },
                },
                {"name": "g", "parametersJsonSchema": {"type": "object"}},
            ]
        },
        {"googleSearch": {}},
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "generationConfig": {
        "temperature": 1,
        "candidateCount": 1,
        "maxOutputTokens": 5,
        "stopSequences": ["x"],
        "responseMimeType": "text/plain",
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": -1},
    },
    "safetySettings": [],
}
DEEP: Any = "x"
for _ in range(600):
    DEEP = {"type": [DEEP], "items": DEEP} if _ < 3 else {"items": DEEP}
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def outcome(body: bytes, method: str, before: ParseCache | None = None) -> ModelRequest | str:
    try:
        return GEMINI.parse(body, BodyContext(before, {"model": "m", "method": method}))
    except InvalidRequest as error:
        return error.message


@given(value=_json, method=st.sampled_from(METHODS))
def test_any_json_is_a_call_or_a_refusal(value: Any, method: str) -> None:
    body = json.dumps(value).encode()
    assert outcome(body, method) == outcome(body, method, ParseCache())


@given(seed=st.integers(0, 2**32), change=_json, method=st.sampled_from(METHODS))
def test_a_body_that_was_valid_is_still_a_call_or_a_refusal(seed: int, change: Any, method: str) -> None:
    before = ParseCache()
    outcome(json.dumps(VALID).encode(), method, before)
    pick = random.Random(seed)
    for _ in range(4):
        body = json.dumps(mutated(pick, VALID, [*STRANGE, DEEP, change])).encode()
        assert outcome(body, method, before) == outcome(body, method)


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(2))
async def test_no_gemini_body_makes_the_gate_fail(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    pick = random.Random(seed)
    async with staged(tiny_model, tmp_path, gate={"max_refusals": 10**6}) as stage:
        stage.engine.answers = [says(reply_ids(stage, "ok"))]
        episode = await stage.episode()
        served = 0
        path = f"{episode['model_url']}/v1beta/models/m"
        async with raw(episode) as client:
            for _ in range(150):
                content = json.dumps(mutated(pick, VALID, [*STRANGE, DEEP]))
                response = await client.post(f"{path}:{METHODS[served % 2]}", content=content)
                assert response.status_code in (200, 400), (response.text, content)
                if response.status_code == 400:
                    assert response.json()["error"]["status"] == "INVALID_ARGUMENT", (response.text, content)
                served += response.status_code == 200
        assert len(await turns(stage, episode)) == served > 20
        report = (await stage.control.post(f"/episodes/{episode['episode_id']}/audit")).json()
        assert report["passed"], report["invariants"]
