"""A model with a form of calls of its own, end to end: ids, notes, and messages that its template would refuse."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from conversation import TOOL, raw, turns, url
from gate_support import says, staged

from turnstile.models.samples_encoding import decode_forest, decode_samples
from turnstile_server.rendering.vocabulary import load_vocabulary

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}{%
if message.role == 'developer' or message.role == 'system' and not loop.first
%}{{ raise_exception('System message must be at the beginning.') }}{%
endif %}<|im_start|>{{ message.role }}
{% if message.role == 'tool' %}Return of {{ message.tool_call_id }}: {% endif %}{{ message.content }}{%
for call in message.tool_calls or [] %}<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id
}}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>{%
endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:7<|tool_call_argument_begin|>"
    '{"command": "  ls\\n"}<|tool_call_end|><|im_end|>'
)


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with a template that writes calls as Kimi K2 does, and refuses late system text."""
    made = tmp_path / "model"
    shutil.copytree(tiny_model, made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


async def test_calls_and_late_system_text_stay_on_one_path(folder: Path, tmp_path: Path) -> None:
    async with staged(folder, tmp_path / "stage") as stage:
        stage.engine.answers = [says(stage.encode(CALL)), says(stage.encode("Done.<|im_end|>"))]
        episode = await stage.episode()
        messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}, {"role": "developer", "content": "d"}]
        async with raw(episode) as client:
            request = {"model": "m", "tools": [TOOL]}
            reply = (await client.post(url(episode), json={**request, "messages": messages})).json()
            said = reply["choices"][0]["message"]
            [call] = said["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"command": "  ls\n"}
            assert call["id"].startswith("call_"), "an id that no other call has"
            messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "out"}]
            messages += [{"role": "system", "content": "late"}]
            await client.post(url(episode), json={**request, "messages": messages})
        vocabulary = load_vocabulary(folder).tokenizer
        first, second = await turns(stage, episode)
        assert second["parent_id"] == first["turn_id"]
        context = vocabulary.decode(second["context_ids"], skip_special_tokens=False)
        assert "Return of functions.bash:7: out" in context, "the id that the model wrote"
        assert "user\n<system>\nlate\n</system>" in context
        assert (first["parse_status"], first["parse_notes"]) == (["ok"], ["end_missing"])
        assert (first["echo"], second["echo"]) == (["system_as_user"], ["system_as_user"])
        record = (await stage.control.get(f"/episodes/{episode['episode_id']}")).json()
        assert record["stats"]["parse"] == {"end_missing": 1}
        assert record["stats"]["cosmetic"] == {"system_as_user": 2}


async def test_a_sampled_row_of_padding_is_counted_stays_on_the_path_and_is_not_trained(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    padding = load_vocabulary(folder).tokenizer.get_vocab_size(with_added_tokens=True)
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": padding + 64}))
    async with staged(folder, tmp_path / "stage") as stage:
        stage.engine.answers = [says([*stage.encode("Let"), padding, *stage.encode(" me.<|im_end|>")])]
        stage.engine.answers.append(says(stage.encode("Done.<|im_end|>")))
        episode = await stage.episode()
        async with raw(episode) as client:
            messages = [{"role": "user", "content": "go"}]
            reply = (await client.post(url(episode), json={"model": "m", "messages": messages})).json()
            said = reply["choices"][0]["message"]
            assert said["content"] == "Let me."
            messages += [said, {"role": "user", "content": "on"}]
            await client.post(url(episode), json={"model": "m", "messages": messages})
        first, second = await turns(stage, episode)
        assert second["parent_id"] == first["turn_id"], "its ids stay on the path"
        assert padding in first["completion_ids"]
        path = f"/episodes/{episode['episode_id']}"
        stats = (await stage.control.get(path)).json()["stats"]
        assert (stats["parse"], stats["untrained"]) == ({"id_without_token": 1}, {"id_without_token": 1})
        (row,) = decode_samples((await stage.control.get(f"{path}/samples")).content).samples
        (also,) = decode_forest((await stage.control.get(f"{path}/tree")).content).to_samples().samples
        assert (also.loss_mask == row.loss_mask).all()
        assert (also.logprobs == row.logprobs).all()
        trained, ids = row.loss_mask, row.input_ids
        at = int(np.flatnonzero(ids == padding)[0])
        assert (row.turn_spans[0].trained, trained[at], row.logprobs[at]) == (True, 0, 0.0)
        assert trained.sum() == stats["trained_tokens"] == stats["sampled_tokens"] - 1
        report = (await stage.control.post(f"{path}/audit")).json()
        assert [check for check in report["invariants"] if check["failures"]] == []


@pytest.mark.parametrize("known", [True, False], ids=["read", "not-read"])
async def test_what_is_not_exact_is_told_by_ready_and_by_the_doctor(
    folder: Path, tmp_path: Path, known: bool
) -> None:
    if not known:
        (folder / "chat_template.jinja").write_text(TEMPLATE.replace("{{ call.id", "<{{ call.function.name"))
    async with staged(folder, tmp_path / "stage") as stage:
        ready = (await stage.control.get("/ready")).json()
    refused = (
        "calls with tools are refused: no installed call format reads the calls that the chat template writes"
    )
    assert (refused in ready.get("model", [])) != known
    command = [str(Path(sys.executable).with_name("turnstile")), "doctor", "--json", "--model", str(folder)]
    checked = await anyio.run_process(command, check=False)
    assert checked.returncode == (0 if known else 1), checked.stderr
    findings = {finding["name"]: finding for finding in json.loads(checked.stdout)["findings"]}
    assert findings["tool calls"]["text"] == ("kimi_k2" if known else "none can be offered")
    assert "system_as_user" in findings["messages"]["text"]
