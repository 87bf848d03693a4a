"""``turnstile episodes reward``: a reward that comes after the end of an episode."""

from __future__ import annotations

import getpass
from typing import Annotated

import typer

from turnstile.cli.connection import DataDirOption, JsonOption, KeyOption, UrlOption, connect
from turnstile.cli.output import USAGE, echo, echo_json, fail, reported


def reward_episode(
    episode_id: str,
    value: Annotated[float | None, typer.Argument(help="The episode's reward; none: only those of turns.")] = None,
    turn: Annotated[
        list[str] | None,
        typer.Option("--turn", metavar="TURN=REWARD", help="Reward of a turn, by its id or its number from 0."),
    ] = None,
    key_of_change: Annotated[
        str | None, typer.Option("--once", help="A key: given again with the same values, it changes nothing.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Over rewards that are there already.")] = False,
    by: Annotated[str | None, typer.Option("--by", help="Who gives it; none: your user name.")] = None,
    why: Annotated[str | None, typer.Option("--why", help="Why, for the record.")] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Give an ended episode its reward, where its task has late rewards. Negative ones: put `--` before the id."""
    turns = dict(map(_turn, turn or ()))
    if value is None and not turns:
        fail("write a reward, or --turn TURN=REWARD", USAGE)
    with reported(), connect(url, key, data_dir) as client:
        episode = client.episode(episode_id).reward(
            value,
            turn_rewards=turns,
            key=key_of_change,
            replace=replace,
            by=by if by is not None else _user(),
            why=why,
        )
        if as_json:
            echo_json(episode.model_dump_json())
            return
        shown = "none" if episode.reward is None else f"{episode.reward:g}"
        echo(f"{episode_id}: reward {shown}, {len(episode.turn_rewards)} turns with a reward of their own")


def _turn(text: str) -> tuple[str, float]:
    name, _, reward = text.rpartition("=")
    try:
        return name or fail(f"--turn {text}: write TURN=REWARD", USAGE), float(reward)
    except ValueError:
        fail(f"--turn {text}: {reward!r} is no number", USAGE)


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name
        return None
