"""``turnstile serve``: reads flags and settings, and runs the server.

Flags exist only for what changes from run to run; the settings' file and environment have everything else. An
impossible configuration is reported setting by setting, with exit code 2, before anything is started.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from turnstile.models.faults import fault_text
from turnstile.plugins import Plugins, UnknownPlugin
from turnstile.visible import visible
from turnstile_server.engines.registry import NO_ENGINE
from turnstile_server.errors import StartupError
from turnstile_server.process import run
from turnstile_server.settings import Settings, load_settings
from turnstile_server.workers.serve import needs_front, run_workers

USAGE = 2


def _part(group: str, *others: str) -> tuple[str, Callable[[str | None], str | None]]:
    """Help text of a flag that names a part, and the flag's check: a part of ``group``, or one of ``others``."""
    parts = Plugins(group)

    def check(name: str | None) -> str | None:
        if name is not None and name not in others:
            try:
                parts.find(name)
            except UnknownPlugin as error:
                raise typer.BadParameter(str(error)) from None
        return name

    return f"[{'|'.join((*parts.names(), *others))}]", check


ENGINES, known_engine = _part("turnstile.engines", NO_ENGINE)
SANDBOXES, known_sandboxes = _part("turnstile.sandboxes")
CALL_FORMATS, known_call_format = _part("turnstile.call_formats", "auto", "none")


class Durability(StrEnum):
    POWER = "power"
    PROCESS = "process"


class EngineDtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class ThinkingHistory(StrEnum):
    KEEP = "keep"
    TEMPLATE = "template"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve(
    model: Annotated[
        Path | None, typer.Option("--model", help="Hugging Face folder, or `tiny`: the policy that ships.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar=ENGINES, callback=known_engine, help="Which engine samples."),
    ] = None,
    engine_url: Annotated[
        list[str] | None,
        typer.Option("--engine-url", help="Base URL of a running engine; may be repeated: the workers."),
    ] = None,
    launch: Annotated[
        bool | None, typer.Option("--launch", help="Start the engine, on --model, and end it with the server.")
    ] = None,
    engine_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ENGINE ARGUMENTS]...", help="Further arguments of an engine of --launch."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="[cpu|cuda|cuda:N]", help="Where the embedded engine computes."),
    ] = None,
    dtype: Annotated[
        EngineDtype | None, typer.Option("--dtype", help="In which type the embedded engine computes.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings file (TOML), below flags and environment.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Journal, index, keys. One server per directory.")
    ] = None,
    control_host: Annotated[
        str | None, typer.Option("--control-host", "--host", help="Address of the control API.")
    ] = None,
    control_port: Annotated[
        int | None, typer.Option("--control-port", "--port", help="Port of the control API; 0 takes a free one.")
    ] = None,
    agent_host: Annotated[
        str | None, typer.Option("--agent-host", help="Address for agents: model API, MCP.")
    ] = None,
    agent_port: Annotated[
        int | None, typer.Option("--agent-port", help="Port for agents; 0 takes a free one.")
    ] = None,
    public_url: Annotated[
        str | None, typer.Option("--public-url", help="URL by which agents outside reach it.")
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            help="Task file, folder, or Python class (`file.py`); may be repeated. None: the tasks that ship.",
        ),
    ] = None,
    agent_specs: Annotated[
        list[str] | None,
        typer.Option("--agent-specs", help="Folder of further agent specs, or module:object; may be repeated."),
    ] = None,
    sandbox: Annotated[
        str | None,
        typer.Option(
            "--sandbox",
            metavar=SANDBOXES,
            callback=known_sandboxes,
            help="Sandbox backend of launched agents and tests.",
        ),
    ] = None,
    sandbox_image: Annotated[
        str | None, typer.Option("--sandbox-image", help="Docker image of tasks that name none.")
    ] = None,
    allow_unisolated: Annotated[
        bool | None,
        typer.Option("--allow-unisolated", help="Local sandboxes without bubblewrap: no isolation at all."),
    ] = None,
    durability: Annotated[
        Durability | None, typer.Option("--durability", help="What an acknowledged turn survives.")
    ] = None,
    call_format: Annotated[
        str | None,
        typer.Option(
            "--call-format",
            metavar=CALL_FORMATS,
            callback=known_call_format,
            help="Form of the model's tool calls, where its chat template does not show it.",
        ),
    ] = None,
    thinking_history: Annotated[
        ThinkingHistory | None, typer.Option("--thinking-history", help="Whether earlier thinking stays.")
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            metavar="[N|auto]",
            help="Worker processes, each with episodes of its own; auto: as cores.",
        ),
    ] = None,
    log_level: Annotated[LogLevel | None, typer.Option("--log-level", help="How much is logged.")] = None,
) -> None:
    """Run a server: the control API for trainers, the model API and MCP endpoint for agents."""
    flags = {
        "model": model,
        "data_dir": data_dir,
        "log_level": log_level,
        "workers.count": workers,
        "engine.kind": engine,
        "engine.url": engine_url[0] if engine_url and len(engine_url) == 1 else None,
        "engine.urls": engine_url if engine_url and len(engine_url) > 1 else None,
        "engine.device": device,
        "engine.dtype": dtype,
        "launch.enabled": launch,
        "launch.arguments": tuple(engine_arguments) if engine_arguments else None,
        "control.host": control_host,
        "control.port": control_port,
        "gate.host": agent_host,
        "gate.port": agent_port,
        "gate.public_url": public_url,
        "tasks.sources": tasks or None,
        "agents.specs": agent_specs or None,
        "sandboxes.kind": sandbox,
        "sandboxes.docker_image": sandbox_image,
        "sandboxes.allow_unisolated": allow_unisolated,
        "journal.durability": durability,
        "rendering.call_format": call_format,
        "rendering.thinking_history": thinking_history,
    }
    settings = settings_of(nested(flags), config)
    if engine_arguments and not settings.launch.enabled:
        _refuse(f"{' '.join(engine_arguments)!r}: arguments of an engine are for one that --launch starts")
    raise typer.Exit(run_workers(settings) if needs_front(settings) else run(settings))


def main() -> None:
    """This command on its own."""
    typer.run(serve)


def nested(flags: dict[str, Any]) -> dict[str, Any]:
    """``{"gate.port": 1, "model": None}`` as ``{"gate": {"port": 1}}``: flags that were not given are absent."""
    out: dict[str, Any] = {}
    for name, value in flags.items():
        if value is None:
            continue
        section, _, field = name.rpartition(".")
        target = out.setdefault(section, {}) if section else out
        target[field] = value.value if isinstance(value, StrEnum) else value
    return out


def settings_of(flags: dict[str, Any], config: Path | None = None) -> Settings:
    """The settings. Wrong ones are reported, setting by setting, and end the command."""
    try:
        if config is not None and not config.is_file():
            _refuse(f"--config {config}: no such file")
        return load_settings(flags, config)
    except tomllib.TOMLDecodeError as error:
        _refuse(f"--config {config}: not TOML: {error}")
    except OSError as error:
        _refuse(f"--config {config}: {error.strerror}")
    except StartupError as error:
        _refuse(*error.message.splitlines())
    except ValidationError as error:
        _refuse(*(_fault(dict(item)) for item in error.errors(include_url=False)))
    raise AssertionError("unreachable")


def _fault(item: dict[str, Any]) -> str:
    """One wrong setting as a line: its name, what it was set to, why that cannot be."""
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"setting {name}: there is no such setting"
    value = "(a key)" if name == "control.key" else repr(item["input"])
    return f"setting {name} = {value}: {fault_text(item)}"


def _refuse(*lines: str) -> None:
    for line in lines:
        typer.echo(visible(f"turnstile: {line}", lines=True), err=True)
    raise typer.Exit(USAGE)
