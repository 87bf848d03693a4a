"""``turnstile doctor`` and ``turnstile agents doctor``: what holds on this machine, before an episode needs it.

The first makes a sandbox and attacks it from inside (``testing/machine.py``) and lists the plug-ins that packages
add (``testing/installed_plugins.py``), or tells what works in an image (``testing/image_check.py``). The second
installs an agent, which plays one small task (or the task that ``--task`` names) with a scripted policy in place
of a model. No model is needed, and nothing of it is for training.

Exit codes: 0; 1 if a check failed; 2 if settings, specs, sandboxes or the model folder cannot be used; 130 and 143
after SIGINT and SIGTERM, when everything was released.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import anyio
import typer

from turnstile.models.episode import parse_env
from turnstile.visible import visible, visible_json
from turnstile_server.commands.serve import nested, settings_of
from turnstile_server.errors import NotFound, StartupError, TaskFailed, Unprocessable
from turnstile_server.testing.doctor import DoctorReport, Finding, check_agent
from turnstile_server.testing.image_check import check_image
from turnstile_server.testing.machine import MachineReport, check_machine, check_parts
from turnstile_server.testing.model_check import check_model

FAILED = 1
USAGE = 2
SIGNALLED = 128
WALL_S = 300.0
TAIL_LINES = 12
LINE_CHARS = 300
MARKS = {True: "ok", False: "FAILED", None: ""}
R = TypeVar("R", DoctorReport, MachineReport)


def doctor(
    name: Annotated[str, typer.Argument(help="The agent.")],
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Hugging Face folder whose tokenizer and chat template are used."),
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="A task whose known solution is played, instead of a small one.")
    ] = None,
    sandbox: Annotated[str | None, typer.Option("--sandbox", help="Where it is launched.")] = None,
    sandbox_image: Annotated[str | None, typer.Option("--sandbox-image", help="Docker image.")] = None,
    allow_unisolated: Annotated[
        bool | None,
        typer.Option("--allow-unisolated", help="Local sandboxes without bubblewrap: no isolation at all."),
    ] = None,
    agent_specs: Annotated[
        list[str] | None,
        typer.Option("--agent-specs", help="Folder of further agent specs, or module:object; may be repeated."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="For the agent's environment; repeat for more."),
    ] = None,
    wall_s: Annotated[float, typer.Option("--wall-s", min=1, help="Seconds for the episode.")] = WALL_S,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    config: Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).")] = None,
) -> None:
    """Install an agent, let it make one tool call and end, and check what was recorded. No model is needed."""
    flags = {
        "model": model,
        "sandboxes.kind": sandbox,
        "sandboxes.docker_image": sandbox_image,
        "sandboxes.allow_unisolated": allow_unisolated,
        "agents.specs": agent_specs or None,
    }
    settings = settings_of(nested(flags), config)
    if model is None:  # the model of a server need not have a template that a policy can read
        settings = settings.model_copy(update={"model": None})
    try:
        variables = parse_env(env or ())
    except ValueError as error:
        typer.echo(f"turnstile: --env {error}", err=True)
        raise typer.Exit(USAGE) from None
    try:
        check = partial(check_agent, settings, name, task_id=task, wall_s=wall_s, env=variables)
        report = anyio.run(_until_signalled, check)
    except (StartupError, Unprocessable, NotFound, TaskFailed) as error:
        typer.echo(visible(f"turnstile: {error.message}", lines=True), err=True)
        raise typer.Exit(USAGE) from None
    if isinstance(report, int):
        raise typer.Exit(SIGNALLED + report)
    as_text = visible_json(_as_json(report)) if as_json else visible(written(report), lines=True)
    typer.echo(as_text)
    if not report.passed:
        raise typer.Exit(FAILED)


def machine(
    sandbox: Annotated[
        str | None, typer.Option("--sandbox", help="Sandbox backend; else as in the settings.")
    ] = None,
    sandbox_image: Annotated[str | None, typer.Option("--sandbox-image", help="Docker image.")] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="Tell instead what works in sandboxes of this Docker image.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Tell instead what is exact with this Hugging Face folder.")
    ] = None,
    parts: Annotated[
        bool, typer.Option("--parts", help="Only list the installed parts: engines, dialects, graders, …")
    ] = False,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Data directory of the server.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    config: Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).")] = None,
) -> None:
    """Try what holds sandboxes on this machine: one is made, and attacked from inside; and list the parts that
    packages add. Or try what works in an image, or with a model folder."""
    if (parts, image is not None, model is not None).count(True) > 1:
        typer.echo("turnstile: --parts, --image and --model ask for different reports; give one", err=True)
        raise typer.Exit(USAGE)
    flags = {"sandboxes.kind": sandbox, "sandboxes.docker_image": sandbox_image, "data_dir": data_dir}
    settings = settings_of(nested(flags), config)
    try:
        if parts:
            check: Callable[[], Awaitable[MachineReport]] = check_parts
        elif model is not None:
            check = partial(check_model, settings.rendering, model)
        else:
            check = partial(check_machine, settings) if image is None else partial(check_image, settings, image)
        report = anyio.run(_until_signalled, check)
    except (StartupError, TaskFailed) as error:
        typer.echo(visible(f"turnstile: {error.message}", lines=True), err=True)
        raise typer.Exit(USAGE) from None
    if isinstance(report, int):
        raise typer.Exit(SIGNALLED + report)
    lines = [_finding_line(finding, whole=True) for finding in report.findings]
    lines.append("All that was tried holds here." if report.passed else "Something does not hold here.")
    as_text = _as_json(report) if as_json else "\n".join(lines)
    typer.echo(visible_json(as_text) if as_json else visible(as_text, lines=True))
    if not report.passed:
        raise typer.Exit(FAILED)


async def _until_signalled(check: Callable[[], Awaitable[R]]) -> R | int:
    """The report, or the number of a signal that came first. Everything is released before this returns."""
    outcome: R | Exception | int | None = None
    async with anyio.create_task_group() as tasks:

        async def stop() -> None:
            nonlocal outcome
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for number in signals:
                    outcome = int(number)
                    tasks.cancel_scope.cancel()

        tasks.start_soon(stop)
        try:
            outcome = await check()
        except Exception as error:  # noqa: BLE001 - raised below as it is; the task group would wrap it
            outcome = error
        tasks.cancel_scope.cancel()
    if isinstance(outcome, Exception):
        raise outcome
    assert outcome is not None
    return outcome


def _as_json(report: DoctorReport | MachineReport) -> str:
    """Not by pydantic, which writes no half of a surrogate pair; an agent may print one."""
    return json.dumps(report.model_dump(), indent=2)


def _one_line(text: str) -> str:
    """The first line of ``text``, cut: some agents print kilobytes of JSON in a line, and errors quote them."""
    first, _, rest = text.partition("\n")
    cut = first[:LINE_CHARS]
    return f"{cut} …" if rest or cut != first else cut


def _finding_line(finding: Finding, *, whole: bool = False) -> str:
    """A mark, what was checked, what was found."""
    text = " ".join(finding.text.split()) if whole else _one_line(finding.text)
    return f"  {MARKS[finding.passed]:<7}{finding.name:<12} {text}"


def written(report: DoctorReport) -> str:
    """The report as lines: a mark, what was checked, what was found."""
    lines = [f"{report.agent} {report.version}"]
    lines += [_finding_line(finding) for finding in report.findings]
    if report.output.strip():
        tail = report.output.strip().splitlines()[-TAIL_LINES:]
        lines += ["The last of what it printed (--json has more):", *(f"  {_one_line(line)}" for line in tail)]
    elif not report.passed:
        lines.append("It printed nothing.")
    lines.append("It works here." if report.passed else "It does not work here.")
    return "\n".join(lines)
