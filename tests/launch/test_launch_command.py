"""What is started for each kind of engine, and which arguments and variables are refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from bounded import bounded
from turnstile_server.engines.launch.command import VLLM_EXTENSION, LaunchCommand, engine_command
from turnstile_server.errors import StartupError
from turnstile_server.settings import LaunchSettings

MODEL = Path("/models/policy")
NOTHING: dict[str, str] = {}


def command(kind: str, *arguments: str, environ: dict[str, str] = NOTHING, **settings: object) -> LaunchCommand:
    launch = bounded(LaunchSettings, enabled=True, arguments=arguments, **settings)  # type: ignore[arg-type]
    return engine_command(kind, MODEL, 4000, launch, environ)


def value_of(argv: tuple[str, ...], flag: str) -> str:
    """The last one counts, as for the engine."""
    return argv[len(argv) - argv[::-1].index(flag)]


def test_sglang_is_started_on_the_loopback_with_the_users_arguments_before_ours() -> None:
    argv = command("sglang", "--tp", "2", python="/opt/sglang/bin/python").argv
    assert argv[:5] == ("/opt/sglang/bin/python", "-m", "sglang.launch_server", "--tp", "2")
    assert argv[-6:] == ("--model-path", "/models/policy", "--host", "127.0.0.1", "--port", "4000")
    assert "--enable-metrics" in argv
    assert "--enable-metrics" not in command("sglang", metrics=False).argv
    assert command("sglang").argv[0] == sys.executable


def test_vllm_is_started_with_what_exact_records_need() -> None:
    started = command("vllm", "--dtype", "float32")
    assert started.argv[1:3] == ("-m", "vllm.entrypoints.openai.api_server")
    assert value_of(started.argv, "--model") == "/models/policy"
    assert value_of(started.argv, "--served-model-name") == "policy"
    assert value_of(started.argv, "--logprobs-mode") == "processed_logprobs"
    assert value_of(started.argv, "--generation-config") == "vllm"
    assert {"--enable-scale-out", "--enable-prompt-tokens-details"} <= set(started.argv)
    assert value_of(started.argv, "--worker-extension-cls") == "turnstile_vllm.LoadFolder"
    assert started.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert started.environment["PYTHONPATH"] == str(VLLM_EXTENSION)


def test_the_users_defaults_win_and_are_given_once() -> None:
    argv = command("vllm", "--served_model_name=mine").argv
    assert "--served-model-name" not in argv
    assert command("sglang", "--enable-metrics").argv.count("--enable-metrics") == 1
    both = command("vllm", environment={"PYTHONPATH": "/mine"}).environment["PYTHONPATH"]
    assert both == f"{VLLM_EXTENSION}:/mine"


@pytest.mark.parametrize(
    ("kind", "arguments", "reason"),
    [
        ("sglang", ("--host", "0.0.0.0"), "--host is not allowed here: Turnstile sets it"),
        ("sglang", ("--port=1",), "--port is not allowed here: launch.port"),
        ("sglang", ("--model-path", "/other"), "--model-path is not allowed"),
        ("sglang", ("--api-key", "secret"), "can read a process's arguments"),
        ("sglang", ("--skip-tokenizer-init",), "compared with ours"),
        ("vllm", ("--logprobs-mode", "raw_logprobs"), "need --logprobs-mode processed_logprobs"),
        ("vllm", ("--logprobs_mode=raw_logits",), "need --logprobs-mode processed_logprobs"),
        ("vllm", ("--generation-config", "auto"), "need --generation-config vllm"),
        ("vllm", ("--no-enable-scale-out",), "need --enable-scale-out"),
        ("vllm", ("--worker-extension-cls", "mine.Worker"), "turnstile_vllm.LoadFolder"),
        ("embedded", (), "--engine embedded is none"),
        ("trainer", (), "--engine trainer is none"),
    ],
)
def test_an_argument_that_exactness_does_not_allow_is_refused_with_its_reason(
    kind: str, arguments: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(StartupError) as caught:
        command(kind, *arguments)
    assert reason in caught.value.message


def test_an_argument_that_says_what_is_needed_anyway_is_taken() -> None:
    argv = command("vllm", "--logprobs-mode", "processed_logprobs", "--enable-scale-out").argv
    assert value_of(argv, "--logprobs-mode") == "processed_logprobs"


@pytest.mark.parametrize(
    ("kind", "name"), [("sglang", "SGLANG_RETURN_ORIGINAL_LOGPROB"), ("vllm", "VLLM_SERVER_DEV_MODE")]
)
def test_a_variable_that_exactness_does_not_allow_is_refused(kind: str, name: str) -> None:
    with pytest.raises(StartupError, match=name):
        command(kind, environment={name: "0"})


def test_the_environment_has_what_is_named_and_nothing_else() -> None:
    environ = {"PATH": "/usr/bin", "CUDA_HOME": "/cuda", "AWS_SECRET": "x", "TURNSTILE_CONTROL_KEY": "k"}
    started = command(
        "sglang", environ=environ, python="/opt/v/bin/python", environment={"A": "1"}, devices=("3",)
    )
    assert started.environment == {
        "PATH": "/opt/v/bin:/usr/bin",
        "CUDA_HOME": "/cuda",
        "CUDA_VISIBLE_DEVICES": "3",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "A": "1",
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"inherit": ("TURNSTILE_CONTROL_KEY",)},
        {"inherit": ("TURN*",)},
        {"inherit": ("*",)},
        {"inherit": ("A*B",)},
        {"environment": {"TURNSTILE_MODEL": "x"}},
        {"environment": {"A=B": "x"}},
        {"environment": {"A": "x\0"}},
        {"devices": ("0", "1")},
        {"port": 65_535, "replicas": 2},
    ],
)
def test_a_setting_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        bounded(LaunchSettings, **wrong)  # type: ignore[arg-type]
