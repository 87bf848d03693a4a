"""Forks of an agent that the server launches: it goes on from its own session file, which a snapshot has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest
from forks_support import Episode, fork, refused, samples, speak, turn_ids
from gate_support import Stage, staged
from light import LIGHT, TASK, light_work

from turnstile.models import EpisodeStatus
from turnstile_server.agents.launch import LaunchContext, build_launch
from turnstile_server.agents.registry import AgentRegistry
from turnstile_server.agents.spec import AgentSpec, Resume

pytestmark = pytest.mark.anyio

SCRIPT = """
import json, os, sys, urllib.request
session = os.path.expanduser("~/session.json")
messages = json.load(open(session)) if "--continue" in sys.argv else []
messages.append({"role": "user", "content": sys.stdin.read()})
for step in range(int(os.environ.get("STEPS", "3"))):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", body, headers)
    reply = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]
    with open("notes", "a") as notes:
        notes.write(reply + ";")
    said = "noted " + open("notes").read()
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": said}]
    if "--forget" not in sys.argv:
        json.dump(messages, open(session, "w"))
print(os.path.exists(session), sys.argv[1:])
"""
KEEPER = AgentSpec(
    name="keeper",
    version="1",
    summary="Asks STEPS times, notes each reply in the work folder, and keeps its conversation.",
    user="agent",
    command=("python3", "-IS", "{home}/agent.py", "--forget"),
    stdin="{instruction}",
    env={"KEY": "{episode_key}", "URL": "{model_url}"},
    files={"{home}/agent.py": SCRIPT.replace("{", "{{").replace("}", "}}")},
    resume=Resume(without=("--forget",), arguments=("--continue",)),
)


@pytest.fixture
async def stage(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    data = tmp_path / "data"
    work, wanted = light_work(tiny_model, data, tmp_path / "installs")
    work = replace(work, agents=AgentRegistry({spec.name: spec for spec in (LIGHT, KEEPER)}))
    async with staged(tiny_model, data, work=work, **wanted) as stage:
        speak(stage)
        yield stage


async def ended(stage: Stage, episode: Episode) -> Episode:
    with anyio.fail_after(120):
        while not EpisodeStatus((found := await stage.get(episode, "?wait=5"))["status"]).ended:
            pass
    assert found["status"] == "completed", found
    return found


async def test_a_fork_resumes_the_session_as_it_was_at_its_turn(stage: Stage) -> None:
    parent = await stage.episode(task=TASK, agent="keeper", snapshots="every_turn")
    await ended(stage, parent)
    first, second, last = await turn_ids(stage, parent)
    children = await fork(stage, parent, turn_id=first, n=2, instruction="Otherwise.", env={"STEPS": "1"})
    [whole] = (await samples(stage, parent)).samples
    for child in children:
        shown = await ended(stage, child)
        assert shown["forked_from"]["instruction"] == "Otherwise."
        assert (shown["agent"], "True ['--continue']" in shown["agent_output"]) == ("keeper", True)
        [turn] = (await stage.get(child, "/turns"))["turns"]
        assert turn["parent_id"] == first
        assert [message["content"] for message in turn["new_messages"]] == ["noted reply a;", "Otherwise."]
        rows = await samples(stage, child)
        [row] = rows.samples
        shared = whole.turn_spans[0].end
        assert np.array_equal(row.input_ids[:shared], whole.input_ids[:shared])
        assert [span.trained for span in row.turn_spans] == [False, True]
        assert (rows.stats.roots, rows.stats.breaks) == (0, {})
        assert (await stage.post(child, "audit"))["passed"]
    [child] = await fork(stage, parent, turn_id=second)
    assert "True ['--continue']" in (await ended(stage, child))["agent_output"]
    turns = (await stage.get(child, "/turns"))["turns"]
    assert [message["content"] for message in turns[0]["new_messages"]][-1] == "Continue."
    assert turns[2]["new_messages"][0]["content"].startswith("noted reply a;reply b;"), "the files of the turn"
    status, said = await refused(stage, parent, "fork", turn_id=last)
    assert (status, "every turn but the last" in said) == (409, True)


@pytest.mark.slow
async def test_a_key_that_was_used_with_another_instruction_is_refused(stage: Stage) -> None:
    parent = await stage.episode(task=TASK, agent="keeper", snapshots="every_turn")
    await ended(stage, parent)
    first, *_ = await turn_ids(stage, parent)
    wanted = {"turn_id": first, "idempotency_key": "k", "instruction": "Try A."}
    [one] = await fork(stage, parent, **wanted)
    [again] = await fork(stage, parent, **wanted)
    assert again["episode_id"] == one["episode_id"]
    status, _ = await refused(stage, parent, "fork", **{**wanted, "instruction": "Try B."})
    assert status == 409


@pytest.mark.slow
async def test_a_session_is_kept_only_where_it_is_wanted_and_others_are_refused_by_name(stage: Stage) -> None:
    plain = await stage.episode(task=TASK, agent="keeper")
    assert "False ['--forget']" in (await ended(stage, plain))["agent_output"]
    first, *_ = await turn_ids(stage, plain)
    status, said = await refused(stage, plain, "fork", turn_id=first)
    assert (status, "keeps no session" in said) == (409, True)
    light = await stage.episode(task=TASK, agent="light")
    status, said = await refused(stage, light, "fork", turn_id=first)
    assert (status, "light is launched" in said, said.endswith("of this server's: keeper")) == (422, True, True)
    status, said = await refused(stage, plain, "snapshot")
    assert (status, "snapshots: every_turn" in said) == (422, True)
    own = await stage.episode()
    status, said = await refused(stage, own, "fork", turn_id=first, instruction="Go on.")
    assert (status, "instruction, env" in said) == (422, True)


def test_a_spec_that_leaves_out_what_its_command_has_not_is_refused() -> None:
    fields = {**KEEPER.model_dump(), "resume": {"without": ["--no-such"], "arguments": ["--continue"]}}
    with pytest.raises(ValueError, match=r"resume\.without: command has no argument --no-such"):
        AgentSpec.model_validate(fields)
    assert not AgentSpec.model_validate({**KEEPER.model_dump(), "user": "harness"}).can_resume


@pytest.mark.parametrize(
    ("keeps", "resumes", "arguments"),
    [(False, False, ["--forget"]), (True, False, []), (True, True, ["--continue"])],
)
def test_the_command_keeps_the_session_and_goes_on_with_it(
    keeps: bool, resumes: bool, arguments: list[str]
) -> None:
    context = LaunchContext(
        "ep_1", "key", "http://d", "it", "/w", "/h", "i", 3, {}, 1000, keeps_session=keeps, resumes=resumes
    )
    assert list(build_launch(KEEPER, context).command.argv[3:]) == arguments
