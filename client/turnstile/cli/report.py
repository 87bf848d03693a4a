"""``turnstile report``: a run as one HTML file for people."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from turnstile.cli.connection import DataDirOption, KeyOption, UrlOption, connect
from turnstile.cli.output import echo, reported
from turnstile.exporters.sample_files import atomic_write
from turnstile.report.contents import EPISODES, TOKENS
from turnstile.report.from_folder import report_of_folder
from turnstile.report.from_server import report_of_run
from turnstile.report.page import page

MOST_EPISODES = 100
MOST_TOKENS = 20_000


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run id, or the folder of `turnstile run --out`.")],
    out: Annotated[Path, typer.Option("--out", help="The file; one that is there is replaced.")] = Path(
        "report.html"
    ),
    episodes: Annotated[
        int, typer.Option("--episodes", min=0, max=MOST_EPISODES, help="Episodes that are shown whole.")
    ] = EPISODES,
    episode: Annotated[
        list[str] | None, typer.Option("--episode", metavar="ID", help="Show this one; repeat for more.")
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=0, max=MOST_TOKENS, help="Tokens that are shown of an episode.")
    ] = TOKENS,
    solved_at: Annotated[float, typer.Option("--solved-at", help="The least reward that counts as solved.")] = 1.0,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Write a run as one HTML file: curves, tables, and some episodes with their conversations and tokens.

    The file needs nothing else: no server, no network, no scripts.
    """
    asked = tuple(episode or ())
    with reported():
        if Path(run).is_dir():
            found = report_of_folder(Path(run), episodes=episodes, asked=asked, tokens=tokens)
        else:
            with connect(url, key, data_dir) as client:
                found = report_of_run(client, run, episodes=episodes, asked=asked, tokens=tokens)
        found = replace(found, solved_at=solved_at)
        with atomic_write(out) as file:
            file.write(page(found).encode())
    echo(f"{out}: {len(found.summaries)} episodes, {len(found.shown)} shown, {out.stat().st_size / 1e6:.1f} MB")
