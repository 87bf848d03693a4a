"""The command line and the environment of an engine that the server starts. Pure: nothing is read or started.

What must hold: the engine listens on 127.0.0.1 alone; what recorded tokens and logprobs need of it is always
there, and an argument that contradicts it is refused; its environment is built from nothing, and has none of our
keys.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from turnstile_server.errors import StartupError
from turnstile_server.settings import LaunchSettings

HOST: Final = "127.0.0.1"
VLLM_EXTENSION: Final = Path(__file__).resolve().parent.parent / "vllm" / "extension"
"""Put on vLLM's PYTHONPATH: its workers import ``turnstile_vllm`` from there."""

_OURS: Final = "Turnstile sets it itself"
_PLAIN: Final = "Turnstile speaks plain HTTP to it, on the loopback interface"
_KEY_SEEN: Final = (
    "every user of this machine can read a process's arguments. Start the engine yourself, and attach"
)
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""The model is a folder. A download that is tried without a network takes minutes to fail."""


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """``environment``: the whole of it."""

    argv: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class EngineProgram:
    """The program of one kind of engine, with its flags and environment. Flags are in their long form with dashes;
    the value None: a switch."""

    module: str
    model_flag: str
    defaults: Mapping[str, str | None]
    """Given unless the user gives them."""
    required: Mapping[str, str | None]
    """Flags that exactness needs: they are always given, and other values are refused."""
    refused: Mapping[str, str]
    """Flags that the user may not give, and why."""
    environment: Mapping[str, str] = field(default_factory=dict)
    refused_environment: Mapping[str, str] = field(default_factory=dict)
    python_path: Path | None = None


PROGRAMS: Final[dict[str, EngineProgram]] = {
    "sglang": EngineProgram(
        module="sglang.launch_server",
        model_flag="--model-path",
        defaults={"--sleep-on-idle": None},
        required={},
        refused={
            **dict.fromkeys(("--model-path", "--model", "--host"), _OURS),
            "--port": "launch.port is its setting",
            **dict.fromkeys(("--ssl-keyfile", "--ssl-certfile"), _PLAIN),
            **dict.fromkeys(("--api-key", "--admin-api-key"), _KEY_SEEN),
            "--skip-tokenizer-init": "its tokenizer is compared with ours, and stop strings need it",
            **dict.fromkeys(("--grpc-mode", "--smg-grpc-mode"), "Turnstile speaks HTTP to it"),
            "--nnodes": "an engine of several machines is started on each of them; start it yourself, and attach",
        },
        environment=_OFFLINE,
        refused_environment={
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "logprobs would not be those of the sampled distribution"
        },
    ),
    "vllm": EngineProgram(
        module="vllm.entrypoints.openai.api_server",
        model_flag="--model",
        defaults={"--disable-uvicorn-access-log": None},
        required={
            "--enable-scale-out": None,
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",
            "--enable-prompt-tokens-details": None,
            "--worker-extension-cls": "turnstile_vllm.LoadFolder",
        },
        refused={
            **dict.fromkeys(("--model", "--host", "--uds", "--root-path"), _OURS),
            "--port": "launch.port is its setting",
            **dict.fromkeys(("--ssl-keyfile", "--ssl-certfile"), _PLAIN),
            "--api-key": _KEY_SEEN,
            "--tokens-only": "its tokenizer is compared with ours, and stop strings need it",
            "--skip-tokenizer-init": "its tokenizer is compared with ours, and stop strings need it",
            "--nnodes": "an engine of several machines is started on each of them; start it yourself, and attach",
        },
        environment={**_OFFLINE, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
        refused_environment={"VLLM_SERVER_DEV_MODE": "pauses and weight updates need it, so Turnstile sets it"},
        python_path=VLLM_EXTENSION,
    ),
}
"""By the engine's kind. An engine that can be launched is added by one entry."""


_NO_MODULE: Final = re.compile(r"ModuleNotFoundError: No module named '(\w+)")


def check_launch(kind: str, settings: LaunchSettings) -> EngineProgram:
    """Raises StartupError for an engine that cannot be launched, or not with these arguments and variables."""
    program = PROGRAMS.get(kind)
    if program is None:
        raise StartupError(
            f"--launch is for an engine that is a server of its own ({', '.join(PROGRAMS)}); "
            f"--engine {kind} is none."
        )
    for name, value in _flags(settings.arguments).items():
        if name in program.refused:
            raise StartupError(f"The engine's argument {name} is not allowed here: {program.refused[name]}.")
        positive = f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name
        if positive in program.required:
            wanted = program.required[positive]
            if name != positive or (wanted is not None and value != wanted):
                shown = " ".join(_written({positive: wanted}))
                raise StartupError(
                    f"The engine's argument {' '.join(_written({name: value}))} is not allowed here: exact "
                    f"records need {shown}, which Turnstile sets itself."
                )
    for name in settings.environment:
        if name in program.refused_environment:
            raise StartupError(f"launch.environment may not set {name}: {program.refused_environment[name]}.")
    return program


def missing_package(kind: str, settings: LaunchSettings, lines: Sequence[str]) -> str:
    """Advice on what to do where the end of an engine's log says that its Python lacks a package; else empty."""
    found = next((match for line in reversed(lines) if (match := _NO_MODULE.search(line))), None)
    if found is None:
        return ""
    package, python = found[1], settings.python or sys.executable
    if package == PROGRAMS[kind].module.partition(".")[0]:
        return (
            f". {python} has no package {package}: install it in a Python environment of its own and name "
            "that one's Python (launch.python, TURNSTILE_LAUNCH__PYTHON), or attach to an engine that runs "
            "elsewhere (--engine-url without --launch)"
        )
    instead = ", or set launch.metrics = false" if (kind, package) == ("sglang", "prometheus_client") else ""
    return f". {python} has no package {package}: install it there{instead}"


def engine_command(
    kind: str,
    model_dir: Path,
    port: int,
    settings: LaunchSettings,
    environ: Mapping[str, str],
    *,
    replica: int = 0,
) -> LaunchCommand:
    """The command of replica ``replica`` on ``port``. ``environ``: the server's own environment. Raises
    StartupError as ``check_launch`` does."""
    program = check_launch(kind, settings)
    python = settings.python or sys.executable
    defaults = dict(program.defaults)
    if kind == "vllm":
        defaults["--served-model-name"] = model_dir.name
    if kind == "sglang" and settings.metrics:
        defaults["--enable-metrics"] = None
    given = _flags(settings.arguments)
    argv = [python, "-m", program.module, *settings.arguments]
    argv += _written({name: value for name, value in defaults.items() if name not in given})
    # Ours come last: of two equal arguments, and of a shortened one, the last is taken.
    argv += _written({**program.required, program.model_flag: str(model_dir), "--host": HOST, "--port": str(port)})
    return LaunchCommand(tuple(argv), _environment(program, python, settings, environ, replica))


def _environment(
    program: EngineProgram, python: str, settings: LaunchSettings, environ: Mapping[str, str], replica: int
) -> dict[str, str]:
    out = {name: value for name, value in environ.items() if _inherited(name, settings.inherit)}
    out |= program.environment
    if settings.devices:
        out["CUDA_VISIBLE_DEVICES"] = settings.devices[replica]
    out |= settings.environment
    if "PATH" not in settings.environment and "/" in python:
        # Programs of the engine's environment (ninja, for one) are found as if it were activated.
        out["PATH"] = ":".join(part for part in (str(Path(python).parent), out.get("PATH")) if part)
    if program.python_path is not None:
        out["PYTHONPATH"] = ":".join(part for part in (str(program.python_path), out.get("PYTHONPATH")) if part)
    return out


def _inherited(name: str, patterns: tuple[str, ...]) -> bool:
    return any(name == pattern or (pattern[-1] == "*" and name.startswith(pattern[:-1])) for pattern in patterns)


def _flags(arguments: tuple[str, ...]) -> dict[str, str | None]:
    """The flags among ``arguments`` with the value that follows. vLLM takes underscores for dashes."""
    found: dict[str, str | None] = {}
    for index, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        name, equals, value = argument.partition("=")
        after = arguments[index + 1] if index + 1 < len(arguments) else "--"
        found[name.replace("_", "-")] = value if equals else None if after.startswith("--") else after
    return found


def _written(flags: Mapping[str, str | None]) -> list[str]:
    return [part for name, value in flags.items() for part in ((name,) if value is None else (name, value))]
