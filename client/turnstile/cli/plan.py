"""``turnstile plan``: what so many episodes at once need, from episodes of the kind that were played."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from turnstile.cli.condition_options import with_conditions
from turnstile.cli.connection import DataDirOption, JsonOption, KeyOption, UrlOption, connect
from turnstile.cli.output import USAGE, Column, echo, echo_json, fail, reported, show_table
from turnstile.conditions import EpisodeConditions
from turnstile.sizing import Capacities, EpisodeKind, FleetPlan, kind_of
from turnstile.sizing import plan as plan_for

FEW = 20
"""Fewer episodes than this say little of a kind."""
_EACH = Capacities()


def _given(help_text: str) -> Any:
    return typer.Option(min=0.0, show_default=False, help=f"{help_text} As measured.")


@with_conditions
def plan(
    episodes: Annotated[int, typer.Argument(min=1, metavar="EPISODES", help="Episodes open at once.")],
    conditions: EpisodeConditions,
    turns: Annotated[float | None, _given("Model calls of an episode.")] = None,
    tokens: Annotated[float | None, _given("Tokens sampled in an episode.")] = None,
    model_s: Annotated[float | None, _given("Seconds of its model calls.")] = None,
    agent_s: Annotated[float | None, _given("Seconds of the agent's own work and its tools.")] = None,
    setup_s: Annotated[float | None, _given("Seconds until the agent starts.")] = None,
    grading_s: Annotated[float | None, _given("Seconds of judging, without waiting for it.")] = None,
    engine_tokens_s: Annotated[
        float, typer.Option(min=1.0, help="Tokens a second of one engine.")
    ] = _EACH.engine_tokens_s,
    host_cores: Annotated[int, typer.Option(min=1, help="Cores of a host of sandboxes.")] = _EACH.host_cores,
    host_gib: Annotated[float, typer.Option(min=1.0, help="Its memory.")] = _EACH.host_gib,
    sandbox_gib: Annotated[float, typer.Option(min=0.0, help="Memory of a sandbox.")] = _EACH.sandbox_gib,
    sandbox_cores: Annotated[
        float, typer.Option(min=0.0, help="Cores of an agent and its tools, on average.")
    ] = _EACH.sandbox_cores,
    grading_cores: Annotated[
        float, typer.Option(min=0.0, help="Cores that one grading keeps busy.")
    ] = _EACH.grading_cores,
    image_gib: Annotated[float, typer.Option(min=0.0, help="A task's image; 0: on the hosts.")] = _EACH.image_gib,
    group: Annotated[int, typer.Option(min=1, help="Episodes of one task together.")] = _EACH.group,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what EPISODES at once need: servers, engines, hosts, cores, traffic of images.

    Their kind is measured on ended episodes of the server, those that the conditions choose, or given: with all
    of --turns, --tokens, --model-s, --agent-s, --setup-s and --grading-s no server is asked.
    """
    given = {
        "turns": turns,
        "sampled_tokens": tokens,
        "model_s": model_s,
        "agent_s": agent_s,
        "setup_s": setup_s,
        "grading_s": grading_s,
    }
    known = {name: value for name, value in given.items() if value is not None}
    each = Capacities(
        engine_tokens_s=engine_tokens_s,
        host_cores=host_cores,
        host_gib=host_gib,
        sandbox_gib=sandbox_gib,
        sandbox_cores=sandbox_cores,
        grading_cores=grading_cores,
        image_gib=image_gib,
        group=group,
    )
    try:
        if len(known) == len(given):
            kind = EpisodeKind(**known)
        else:
            with reported(), connect(url, key, data_dir) as client:
                rows = [row for row in client.summaries(**conditions) if row.ended_s is not None]
            kind = replace(kind_of(rows), **known)
            few = " (few: their means may be far from those of the kind)" if len(rows) < FEW else ""
            echo(f"Measured on {len(rows)} ended episodes{few}.", err=True)
        found = plan_for(episodes, kind, each)
    except ValueError as error:
        fail(str(error), USAGE)
    if as_json:
        echo_json(json.dumps({"open": episodes, "kind": asdict(kind), "each": asdict(each), **asdict(found)}))
        return
    echo(
        f"An episode: {kind.turns:.1f} turns, {kind.sampled_tokens:,.0f} tokens, {kind.total_s:.1f} s (setup "
        f"{kind.setup_s:.1f}, model {kind.model_s:.1f}, agent and tools {kind.agent_s:.1f}, "
        f"grading {kind.grading_s:.1f})."
    )
    show_table(
        [Column("part", "text"), Column("needs", "text"), Column("because", "text")],
        rows_of(found, each),
    )


def rows_of(found: FleetPlan, each: Capacities) -> list[tuple[str, str, str]]:
    """The table's lines."""
    return [
        (
            "flow",
            f"{found.episodes_s:.2f} episodes/s",
            f"{found.turns_s:,.1f} turns/s, {found.tokens_s:,.0f} sampled tokens/s",
        ),
        (
            "engines",
            f"{found.engines:,}",
            f"{each.engine_tokens_s:,.0f} tokens/s each; {found.calls:,.0f} calls at once, "
            f"{found.calls / max(found.engines, 1):,.0f} on each",
        ),
        (
            "servers",
            f"{found.servers:,} processes, {found.server_cores:.1f} cores, {found.server_gib:.1f} GiB",
            f"{each.server_episodes} open episodes each; the gate's part is {found.gate_cores:.2f} cores, "
            f"{found.gate_share:.1%} of all cores here",
        ),
        (
            "sandboxes",
            f"{found.sandboxes:,.0f}: {found.sandbox_gib:,.0f} GiB, {found.sandbox_cores:,.0f} cores",
            f"{found.working:,.0f} at work, two for each grading; {found.episodes_s:.1f} episodes/s begin one",
        ),
        (
            "grading",
            f"{found.gradings:,.0f} at once, {found.grading_cores:,.0f} cores",
            f"grading.parallel of all servers at least {math.ceil(found.gradings)}",
        ),
        (
            "hosts",
            f"{found.hosts:,}",
            f"sandboxes and gradings on {each.host_cores} cores and {each.host_gib:g} GiB each",
        ),
        (
            "images",
            f"{found.image_gib_s:.2f} GiB/s",
            f"{found.images_s:.2f} new images/s where a group of {each.group} has one host, "
            f"{found.image_gib_s * each.group:.2f} GiB/s where not",
        ),
    ]
