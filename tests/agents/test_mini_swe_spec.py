"""What the spec of mini-swe-agent says: checked without installing it."""

from __future__ import annotations

import yaml

from local import ROOT
from turnstile_server.agents.launch import LaunchContext, build_launch
from turnstile_server.agents.registry import load_registry


def test_it_is_installed_at_the_versions_that_the_tests_run_with() -> None:
    spec = load_registry().get("mini-swe-agent")
    lines = (ROOT / "scripts" / "mini-swe-agent.txt").read_text().splitlines()
    assert list(spec.install.pip) == [line for line in lines if line and not line.startswith("#")]
    assert f"mini-swe-agent=={spec.version}" in spec.install.pip


def test_its_configuration_is_yaml_whatever_the_task_says() -> None:
    instruction = "Mend {this} \"file\": 'now'\n- [x"
    occasion = LaunchContext(
        episode_id="ep_1",
        episode_key="key-1",
        agent_url="http://127.0.0.1:8001",
        instruction=instruction,
        workdir="/work folder",
        home="/home/agent",
        install="mini",
        max_turns=7,
        env={"EXTRA": "1"},
        max_output_bytes=1000,
    )
    made = build_launch(load_registry().get("mini-swe-agent"), occasion)
    config = yaml.safe_load(made.files["/home/agent/turnstile.yaml"])
    assert config["agent"]["step_limit"] == 7
    assert config["environment"]["cwd"] == "/work folder"
    assert config["model"]["model_kwargs"]["api_base"] == "http://127.0.0.1:8001/e/ep_1/v1"
    assert made.files["/home/agent/instruction.md"] == instruction
    assert instruction not in " ".join(made.command.argv)
    assert made.command.env["OPENAI_API_KEY"] == "key-1"
    assert made.command.env["EXTRA"] == "1"
