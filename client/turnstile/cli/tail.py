"""``turnstile episodes tail``: an episode's turns as they come, until it ends; the last line says why it ended."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from turnstile.cli.connection import DataDirOption, JsonOption, KeyOption, UrlOption, connect
from turnstile.cli.output import echo, echo_json, reported, show_text
from turnstile.cli.transcript import show_turns, why_shown


def tail_episode(
    episode_id: str,
    full: Annotated[bool, typer.Option("--full", help="All of every text, not its beginning.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.05, help="Seconds between two looks.")] = 1.0,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Follow an episode: every turn as it is recorded, each change of status, and at the end why it ended."""
    with reported(), connect(url, key, data_dir) as client:
        handle = client.episode(episode_id)
        shown, status = 0, None
        while True:
            episode = handle.status()
            if not as_json and episode.status is not status and not episode.status.ended:
                echo(f"{episode.episode_id} is {episode.status.value}")
            status = episode.status
            if episode.stats.turns > shown:
                turns = handle.turn_outlines()
                if as_json:
                    for turn in turns[shown:]:
                        echo_json(turn.model_dump_json())
                else:
                    show_turns(turns[shown:], full=full)
                shown = len(turns)
            if episode.status.ended:
                break
            time.sleep(interval)
        if as_json:
            echo_json(episode.model_dump_json())
        else:
            echo("")
            show_text(why_shown(episode))
