"""``turnstile.gym``: a real agent in a real sandbox as a Gymnasium environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import httpx
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

import turnstile.gym
from training_support import SLOW_S, TrainerServer, trainer_server
from turnstile import Client, InvalidRequest, ServerUnavailable, Timeout, TurnstileError
from turnstile.gym import AgentEnv, EpisodeFailed, PromptTooLong, pack
from waiting import wait_until_sync

pytestmark = pytest.mark.slow

END = "<|im_end|>"
TASKS = ["sum-1", "sum-2", "sum-4"]
WIDTH = 48


def arguments(server: TrainerServer, **more: Any) -> dict[str, Any]:
    return {
        "url": server.url,
        "key": server.key,
        "tasks": TASKS,
        "agent": "plain-loop",
        "max_prompt_tokens": 4096,
        "max_completion_tokens": WIDTH,
        "wait_s": SLOW_S,
        **more,
    }


@contextmanager
def made(server: TrainerServer, **more: Any) -> Iterator[gymnasium.Env[Any, Any]]:
    env = gymnasium.make("Turnstile/Agent-v0", **arguments(server, **more))
    try:
        yield env
    finally:
        env.close()


def completion_action(server: TrainerServer, text: str) -> dict[str, Any]:
    """An action: what a policy that samples this text would give."""
    ids = server.encode(text + END)
    return pack(ids, np.linspace(-1.5, -0.25, len(ids)), WIDTH)


def submit(answer: str) -> str:
    call = json.dumps({"name": "submit", "arguments": {"answer": answer}})
    return f"<tool_call>\n{call}\n</tool_call>"


def prompt(server: TrainerServer, observation: dict[str, Any]) -> str:
    return server.decode(observation["prompt_ids"][: observation["prompt_length"]])


def open_episodes(server: TrainerServer) -> list[str]:
    with Client(server.url, key=server.key) as client:
        return [episode.episode_id for episode in client.episodes() if not episode.status.ended]


def answer_to(server: TrainerServer, observation: dict[str, Any]) -> str:
    number = next(n for n in (1, 2, 4) if f"{n} + 3?" in prompt(server, observation))
    return str(number + 3)


def test_an_agent_in_a_sandbox_is_an_environment(playing_server: TrainerServer) -> None:
    with made(playing_server, info_ids=True, weight_version="step-1") as env:
        observation, info = env.reset(seed=5)
        assert observation in env.observation_space
        assert prompt(playing_server, observation).endswith("<|im_start|>assistant\n")
        assert (observation["max_new_tokens"], info["answered"]) == (WIDTH, True)
        answer = answer_to(playing_server, observation)
        action = completion_action(playing_server, submit(answer))
        assert action in env.action_space
        observation, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated) == (1.0, True, False)
        assert (info["status"], info["graded"], info["turns"], info["error"]) == ("completed", True, 1, "")
        assert observation in env.observation_space
        assert observation["prompt_length"] == 0
        with pytest.raises(gymnasium.error.ResetNeeded):
            env.unwrapped.step(action)
        with Client(playing_server.url, key=playing_server.key) as client:
            episode = client.episode(info["episode_id"])
            (turn,) = episode.turns()
            assert episode.status().seed == 5
            length = int(action["length"])
            assert turn.completion_ids.tolist() == action["completion_ids"][:length].tolist()
            np.testing.assert_array_equal(turn.logprobs, action["logprobs"][:length, 0])
            (row,) = episode.samples().samples
            assert (row.reward, row.weight_version_names) == (1.0, ("step-1",))


def test_a_step_that_ends_nothing_gives_the_next_call_of_the_agent(playing_server: TrainerServer) -> None:
    with made(playing_server) as env:
        first, _ = env.reset(seed=5, options={"task": "sum-2"})
        length = int(first["prompt_length"])
        call = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo hi there"}}\n</tool_call>'
        second, reward, terminated, truncated, info = env.step(completion_action(playing_server, call))
        assert (reward, terminated, truncated, info) == (0.0, False, False, {"answered": True, "json_schema": ""})
        assert second["prompt_ids"][:length].tolist() == first["prompt_ids"][:length].tolist()
        assert "hi there" in prompt(playing_server, second)
        _, reward, terminated, _, info = env.step(completion_action(playing_server, submit("6")))
        assert (reward, terminated, info["graded"]) == (0.0, True, True)


def test_a_text_can_be_the_action(playing_server: TrainerServer) -> None:
    with made(playing_server, action="text", info_ids=True) as env:
        observation, _ = env.reset(seed=1)
        text = submit(answer_to(playing_server, observation))
        *_, info = end = env.step(text)
        assert end[1:4] == (1.0, True, False)
        with Client(playing_server.url, key=playing_server.key) as client:
            samples = client.episode(info["episode_id"]).samples()
    assert [row.reason for row in samples.untrained] == ["given"]


@pytest.mark.parametrize("kind", ["ids", "text"])
def test_gymnasiums_checker_finds_nothing(playing_server: TrainerServer, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with made(playing_server, action=kind) as env:
            check_env(env.unwrapped)
    assert open_episodes(playing_server) == []


def test_the_checker_would_find_an_info_with_ids(playing_server: TrainerServer) -> None:
    with (
        made(playing_server, info_ids=True) as env,
        pytest.raises(AssertionError, match="info are not equivalent"),
    ):
        check_env(env.unwrapped)


def test_an_action_is_read_as_a_samplers_output(playing_server: TrainerServer) -> None:
    """What is behind the first stop id, ``length`` or the call's ``max_new_tokens`` is padding."""
    ids = playing_server.encode(f"Hello.{END}")
    cut = {"completion_ids": [*ids, 5, 6, 7], "logprobs": [-0.5] * (len(ids) + 3)}
    long = {"completion_ids": [5] * WIDTH, "logprobs": [-0.5] * WIDTH}
    padded = pack(ids[:2], [-0.5] * 2, WIDTH)
    for action, taken in ((cut, len(ids)), (long, 20), (padded, 2)):
        with made(playing_server, info_ids=True, limits={"max_completion_tokens": 20}) as env:
            observation, info = env.reset(seed=1)
            assert observation["max_new_tokens"] == 20
            *_, info = env.step(action)
            with Client(playing_server.url, key=playing_server.key) as client:
                assert len(client.episode(info["episode_id"]).turns()[0].completion_ids) == taken


def test_an_action_that_cannot_be_a_turn_leaves_the_call_pending(playing_server: TrainerServer) -> None:
    with made(playing_server) as env:
        env.reset(seed=1)
        good = completion_action(playing_server, "Hm.")
        for wrong in (
            {"completion_ids": [5, 6], "logprobs": [-0.5]},
            {"completion_ids": [5], "logprobs": [float("nan")]},
            {"completion_ids": [5], "logprobs": [0.5]},
            {"completion_ids": [], "logprobs": []},
            {"completion_ids": [5]},
            {"completion_ids": [5, 6], "logprobs": [-0.5, -0.5], "length": -1},
            [5, 6],
            "A text, where the action is ids.",
        ):
            with pytest.raises(InvalidRequest):
                env.unwrapped.step(wrong)
        assert env.step(good)[2]
    with pytest.raises(InvalidRequest, match="room for"):
        pack([1] * (WIDTH + 1), [-0.5] * (WIDTH + 1), WIDTH)


def test_seeds_choose_tasks_and_options_name_one(playing_server: TrainerServer) -> None:
    with made(playing_server, tasks=None) as env:  # all of the server's
        seen = {answer_to(playing_server, env.reset(seed=seed)[0]) for seed in range(8)}
        assert len(seen) > 1
        first = [answer_to(playing_server, env.reset(seed=3)[0])] + [
            answer_to(playing_server, env.reset()[0]) for _ in range(3)
        ]
        again = [answer_to(playing_server, env.reset(seed=3)[0])] + [
            answer_to(playing_server, env.reset()[0]) for _ in range(3)
        ]
        assert first == again
        assert answer_to(playing_server, env.reset(options={"task": "sum-4"})[0]) == "7"
        inline = {"instruction": "Say hello."}
        assert "Say hello." in prompt(playing_server, env.reset(options={"task": inline})[0])
        with pytest.raises(InvalidRequest, match="tasks"):
            env.reset(options={"tasks": TASKS})
    assert open_episodes(playing_server) == []


def test_a_reward_that_there_is_not_is_no_silent_zero(playing_server: TrainerServer) -> None:
    with made(playing_server, tasks=[{"instruction": "Say hello."}]) as env:
        env.reset()
        _, reward, terminated, truncated, info = env.step(completion_action(playing_server, "Hello."))
        assert (reward, terminated, truncated) == (0.0, True, False)
        assert (info["graded"], info["status"]) == (False, "completed")


def test_a_budget_truncates_and_keeps_its_reward(playing_server: TrainerServer) -> None:
    call = completion_action(
        playing_server, '<tool_call>\n{"name": "bash", "arguments": {"command": "true"}}\n</tool_call>'
    )
    with made(playing_server, limits={"max_sampled_tokens": int(call["length"])}) as env:
        env.reset(seed=1)
        _, reward, terminated, truncated, info = env.step(call)
    assert (reward, terminated, truncated, info["graded"], info["status"]) == (0.0, False, True, True, "truncated")


def test_an_episode_that_is_cancelled_is_truncated_and_says_so(playing_server: TrainerServer) -> None:
    with made(playing_server, info_ids=True) as env:
        _, info = env.reset(seed=1)
        with Client(playing_server.url, key=playing_server.key) as client:
            client.episode(info["episode_id"]).cancel()
        _, reward, terminated, truncated, info = env.step(completion_action(playing_server, "Hm."))
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert (info["status"], info["graded"], info["answered"]) == ("cancelled", False, False)


def test_a_prompt_that_is_too_long_is_an_error_at_reset_and_truncates_later(playing_server: TrainerServer) -> None:
    with made(playing_server) as env:
        length = int(env.reset(seed=1)[0]["prompt_length"])
    with (
        made(playing_server, max_prompt_tokens=length - 1) as env,
        pytest.raises(PromptTooLong, match="max_prompt"),
    ):
        env.reset(seed=1)
    call = completion_action(
        playing_server, '<tool_call>\n{"name": "bash", "arguments": {"command": "seq 99"}}\n</tool_call>'
    )
    with made(playing_server, max_prompt_tokens=length) as env:
        env.reset(seed=1)
        _, reward, terminated, truncated, info = env.step(call)
        assert (reward, terminated, truncated, info["graded"]) == (0.0, False, True, False)
        assert info["status"] == "prompt_too_long"
        assert "max_prompt_tokens" in info["error"]
    assert open_episodes(playing_server) == []


@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
def test_it_works_in_vectors(playing_server: TrainerServer, vector: Any) -> None:
    """Three agents at once, each in a process of its own (with shared memory) or one after another."""

    def make() -> gymnasium.Env[Any, Any]:
        return gymnasium.make("Turnstile/Agent-v0", **arguments(playing_server))

    envs = vector([make] * 3)
    try:
        observations, _ = envs.reset(seed=[1, 2, 3])
        for _ in range(2):
            answers = []
            for number in range(3):
                one = {name: column[number] for name, column in observations.items()}
                right = answer_to(playing_server, one)
                answers.append(completion_action(playing_server, submit(right if number else "wrong")))
            actions = {name: np.stack([answer[name] for answer in answers]) for name in answers[0]}
            _, rewards, terminated, truncated, infos = envs.step(actions)
            assert rewards.tolist() == [0.0, 1.0, 1.0]
            assert terminated.all()
            assert not truncated.any()
            assert infos["graded"].all()
            observations, *_ = envs.step(actions)  # the step in which Gymnasium resets
            assert (observations["prompt_length"] > 0).all()
        envs.set_attr("weight_version", "step-2")
        assert envs.get_attr("weight_version") == ("step-2",) * 3
    finally:
        envs.close()
    assert open_episodes(playing_server) == []


def test_make_vec_makes_it_by_name(playing_server: TrainerServer) -> None:
    envs = gymnasium.make_vec(
        turnstile.gym.ENV_ID, num_envs=2, vectorization_mode="async", **arguments(playing_server, action="text")
    )
    try:
        envs.reset(seed=1)
        _, _, terminated, _, infos = envs.step(("Hello.", submit("4")))
        assert terminated.all()
        assert infos["sampled_tokens"].min() > 0
    finally:
        envs.close()
    assert open_episodes(playing_server) == []


LEFT = """
import os, signal, sys
import gymnasium, turnstile.gym
env = gymnasium.make("Turnstile/Agent-v0", url=sys.argv[1], key=sys.argv[2], tasks=["Say hello."],
                     agent="plain-loop")
env.reset()
print("waiting", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_environment_leaves_no_episode_open(tiny_model: Path, tmp_path: Path) -> None:
    """Its agent's call runs into engine.completion_timeout_s, and the agent gives up."""
    settings: dict[str, Any] = {"sandboxes": {"kind": "local"}, "engine": {"completion_timeout_s": 0.5}}
    with trainer_server(tiny_model, tmp_path, **settings) as server:
        killed = subprocess.run(
            [sys.executable, "-c", LEFT, server.url, server.key],
            stdout=subprocess.PIPE,
            check=False,
            timeout=SLOW_S,
        )
        assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, b"waiting\n")
        wait_until_sync(lambda: not open_episodes(server))
        with Client(server.url, key=server.key) as client:
            (episode,) = client.episodes()
    assert episode.status == "failed"
    assert episode.error is not None
    assert (episode.error.type, episode.error.fault) == ("engine_timeout", "infrastructure")


def test_an_agent_that_is_killed_ends_the_episode(playing_server: TrainerServer) -> None:
    """Its process dies while its call waits: truncated, graded 0, and the reason is told."""
    before = _agents()
    with made(playing_server) as env:
        env.reset(seed=1)
        for pid in _agents() - before:
            os.kill(pid, signal.SIGKILL)
        _, reward, terminated, truncated, info = env.step(completion_action(playing_server, "Hm."))
    assert (reward, terminated, truncated, info["graded"]) == (0.0, False, True, True)
    assert (info["status"], info["fault"]) == ("failed", "agent")


def _agents() -> set[int]:
    """Processes that run the agent's script."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"python3" in words[0] and any(word.endswith(b"plain_loop.py") for word in words):
            found.add(int(entry.parent.name))
    return found


def test_a_server_that_stops_is_an_error_of_the_step(tiny_model: Path, tmp_path: Path) -> None:
    running = trainer_server(tiny_model, tmp_path, sandboxes={"kind": "local"})
    server = running.__enter__()
    env = gymnasium.make("Turnstile/Agent-v0", **arguments(server, tasks=["Say hello."]))
    env.reset()
    running.__exit__(None, None, None)
    with pytest.raises(ServerUnavailable):
        env.step(completion_action(server, "Hello."))
    env.close()  # nobody there to cancel anything: logged, not raised
    env.close()


def test_a_server_that_goes_away_after_the_completion_leaves_no_call_to_answer_twice(
    playing_server: TrainerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: float) -> None:
        raise ServerUnavailable("away")

    with made(playing_server) as env:
        env.reset(seed=1)
        monkeypatch.setattr(env.unwrapped._episode, "pending", away)
        with pytest.raises(ServerUnavailable):
            env.unwrapped.step(completion_action(playing_server, "Hm."))
        with pytest.raises(gymnasium.error.ResetNeeded):
            env.unwrapped.step(completion_action(playing_server, "Hm, again."))
        assert env.reset(seed=1)[0]["prompt_length"] > 0
    assert open_episodes(playing_server) == []


def test_a_call_that_the_server_does_not_know_any_more_was_not_answered(playing_server: TrainerServer) -> None:
    """As after a restart: what comes next, another call or the end, is the step's result."""
    with made(playing_server) as env:
        observation, _ = env.reset(seed=1)
        env.unwrapped._call = env.unwrapped._call.model_copy(update={"call_id": "call_of_before"})
        same, _, terminated, _, info = env.step(completion_action(playing_server, "Hm."))
        assert (terminated, info["answered"]) == (False, False)
        np.testing.assert_array_equal(same["prompt_ids"], observation["prompt_ids"])


def test_an_agent_that_never_calls_is_told_at_reset(playing_server: TrainerServer) -> None:
    with made(playing_server, agent="external", wait_s=0.2) as env, pytest.raises(Timeout, match="wait_s"):
        env.reset(seed=1)
    broken = {"instruction": "Do it.", "setup": ["exit 3"]}
    with made(playing_server, tasks=[broken]) as env, pytest.raises(EpisodeFailed, match="task_failed"):
        env.reset(seed=1)
    with made(playing_server, agent="no-such-agent") as env, pytest.raises(TurnstileError):
        env.reset(seed=1)
    assert open_episodes(playing_server) == []


@pytest.mark.parametrize("wrong", [{"action": "words"}, {"tasks": []}, {"reset_attempts": 0}])
def test_arguments_that_cannot_be_are_refused(playing_server: TrainerServer, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest), made(playing_server, **wrong):
        pass


def test_importing_it_needs_gymnasium_and_the_client_alone_does_not() -> None:
    code = "import turnstile, turnstile.client, turnstile.sync, sys; assert 'gymnasium' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SLOW_S)


def test_parallel_calls_of_one_agent_come_one_after_another(
    server: TrainerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An external agent asks twice at once, as one with sub-agents does: both calls are steps."""
    shared = "created-by-both"
    replies: dict[str, str] = {}

    def play() -> None:
        """The agent: the same creation again gives it the episode's key."""
        with Client(server.url, key=server.key) as client:
            episode = client.create_episode("Answer both.", idempotency_key=shared)
            headers = {"authorization": f"Bearer {episode.episode_key}"}

            def ask(question: str) -> None:
                body = {"model": "m", "messages": [{"role": "user", "content": question}]}
                url = f"{episode.model_url}/v1/chat/completions"
                answer = httpx.post(url, headers=headers, json=body, timeout=SLOW_S).json()
                replies[question] = answer["choices"][0]["message"]["content"]

            with ThreadPoolExecutor(2) as pool:
                list(pool.map(ask, ["first?", "second?"]))
            episode.finish()

    env = AgentEnv(**arguments(server, agent="external", tasks=["Answer both."]))
    create = env._client.create_episode
    monkeypatch.setattr(
        env._client, "create_episode", lambda task, **_: create("Answer both.", idempotency_key=shared)
    )
    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(play)
        observation, _ = env.reset()
        ended = False
        while not ended:
            which = "first" if "first?" in prompt(server, observation) else "second"
            observation, _, ended, _, _ = env.step(completion_action(server, f"The {which}."))
        playing.result()
    env.close()
    assert replies == {"first?": "The first.", "second?": "The second."}
