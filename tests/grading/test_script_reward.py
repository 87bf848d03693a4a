"""The reward files of a script: what is a reward, and what is said of everything that is none."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path

import pytest

from turnstile_server.grading.inside.read_reward import read_file
from turnstile_server.grading.script_reward import NoReward, ScriptReward, read_reward


def reward(json_text: str | None = None, text: str | None = None, *, key: str = "reward") -> ScriptReward:
    given = {"reward.json": json_text, "reward.txt": text}
    files = {name: {"text": said} for name, said in given.items() if said is not None}
    return read_reward(files, key)


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1.0), (" 0.25\n", 0.25), ("1e-1", 0.1), ("0", 0.0), ("1_0e-1", 1.0)]
)
def test_a_text_is_one_number(text: str, value: float) -> None:
    assert reward(text=text).value == value


def test_an_object_counts_before_a_text_and_keeps_all_its_numbers() -> None:
    found = reward('{"reward": 0.5, "style": true, "speed": 12}', "1")
    assert (found.value, found.file) == (0.5, "reward.json")
    assert found.rewards == {"reward": 0.5, "style": 1.0, "speed": 12.0}
    assert reward('{"score": 1}', key="score").value == 1.0


@pytest.mark.parametrize(
    ("json_text", "text", "said"),
    [
        (None, None, "neither reward.json nor reward.txt"),
        (None, "", "reward.txt is empty"),
        (None, " \n", "reward.txt is empty"),
        (None, "nan", "no finite number"),
        (None, "inf", "no finite number"),
        (None, "1 0", "reward.txt is not one number: 1 0"),
        (None, "passed", "reward.txt is not one number: passed"),
        (None, "\xff", "reward.txt is not UTF-8"),
        ("", "1", "reward.json is empty"),
        ("1", "1", "reward.json is not an object of numbers: 1"),
        ("[1]", None, "not an object"),
        ("{}", "1", "has no key 'reward'"),
        ('{"score": 1}', None, "has no key 'reward', which is the reward; it has score: name the one to take"),
        ('{"reward": NaN}', None, "NaN is no finite number"),
        ('{"reward": 1e999}', None, "'reward' is no finite number"),
        ('{"reward": "1"}', None, "'reward' is not a number: \"1\""),
        ('{"reward": null}', None, "is not a number"),
        ('{"reward": 1, "style": "good"}', None, "'style' is not a number"),
        ('{"reward": 1, "reward": 0}', None, "a key is given twice"),
        ("{", None, "reward.json is not JSON"),
        ("[" * 100_000, None, "reward.json is not JSON"),
        ('{"reward": 1' + "0" * 400 + "}", None, "no finite number"),
    ],
)
def test_anything_else_is_no_reward_and_never_0(json_text: str | None, text: str | None, said: str) -> None:
    with pytest.raises(NoReward) as told:
        reward(json_text, text)
    assert said in str(told.value)


def test_a_file_is_read_through_no_link_and_no_further_than_its_bound(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("1")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"1" * 65)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        found = {name: read_file(folder, name, 64) for name in ("real", "link", "folder", "pipe", "large", "none")}
        assert found == {
            "real": {"text": "1"},
            "link": {"fault": "it is a link"},
            "folder": {"fault": "it is a folder"},
            "pipe": {"fault": "it is not a regular file"},
            "large": {"fault": "it has more than 64 bytes"},
            "none": None,
        }
        assert "fault" in (read_file(folder, "socket", 64) or {})
    finally:
        os.close(folder)


@pytest.mark.parametrize("name", ["reward.json", "reward.txt"])
def test_a_file_that_cannot_be_read_is_no_reward(name: str) -> None:
    with pytest.raises(NoReward, match=f"{name} cannot be read: it is a link"):
        read_reward({name: {"fault": "it is a link"}}, "reward")


def test_numbers_of_json_are_as_python_reads_them() -> None:
    assert math.isclose(reward(json.dumps({"reward": 1 / 3})).value, 1 / 3)
