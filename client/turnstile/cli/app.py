"""The command tree. A command is one line of a table; ``turnstile.cli.commands`` imports its code when called."""

from __future__ import annotations

import json
from importlib.metadata import distribution
from typing import Annotated, Any

import typer

from turnstile.cli.commands import CommandEntry, CommandGroup

AGENTS = {
    "list": CommandEntry("turnstile.cli.agents:list_agents", "The agents of the server, or of each of several."),
}
EPISODES = {
    "list": CommandEntry("turnstile.cli.episodes:list_episodes", "Episodes, newest first."),
    "show": CommandEntry(
        "turnstile.cli.episodes:show_episode",
        "One episode: its state, its token accounting and, with --turns, every model call.",
    ),
    "tree": CommandEntry(
        "turnstile.cli.episode_tree:show_tree",
        "The turns as a tree: branches, sub-agents, breaks, what is trained.",
    ),
    "diff": CommandEntry(
        "turnstile.cli.episode_diff:diff_episodes",
        "Two episodes beside each other, and where their messages part.",
    ),
    "tail": CommandEntry("turnstile.cli.tail:tail_episode", "Follow an episode's turns until it ends."),
    "reward": CommandEntry(
        "turnstile.cli.reward:reward_episode", "Give an ended episode, or turns of it, a reward."
    ),
    "export": CommandEntry("turnstile.cli.episodes:export_episodes", "The samples of episodes, for a trainer."),
    "regrade": CommandEntry(
        "turnstile.cli.regrade:regrade", "Judge kept work again, without the agent, and compare the grades."
    ),
}
WORKERS = {
    "add": CommandEntry("turnstile.cli.engine:add_worker", "An engine joins, by its URL."),
    "remove": CommandEntry("turnstile.cli.engine:remove_worker", "A worker goes when its calls have ended."),
}
ADAPTERS = {
    "load": CommandEntry("turnstile.cli.engine:load_adapter", "Load a LoRA adapter beside the weights."),
    "unload": CommandEntry("turnstile.cli.engine:unload_adapter", "Forget a LoRA adapter."),
}
ENGINE = {
    "status": CommandEntry("turnstile.cli.engine:status", "The engine of the server and its workers."),
    "pause": CommandEntry("turnstile.cli.engine:pause", "Hold all generation."),
    "resume": CommandEntry("turnstile.cli.engine:resume", "Undo any number of pauses."),
    "weights": CommandEntry(
        "turnstile.cli.engine:load_weights",
        "Load new weights: a folder that the engine reads, sent, or broadcast.",
    ),
    "sleep": CommandEntry("turnstile.cli.engine:sleep", "Free the engine's memory."),
    "wake": CommandEntry("turnstile.cli.engine:wake", "Take the engine's memory back."),
    "workers": CommandEntry(WORKERS, "Engines that join and leave at run time."),
    "adapters": CommandEntry(ADAPTERS, "LoRA adapters beside the weights."),
}
COMMANDS = {
    "run": CommandEntry(
        "turnstile.cli.run:run", "Roll tasks out with an agent, show and keep the resulting episodes."
    ),
    "eval": CommandEntry(
        "turnstile.cli.evaluate:evaluate_models", "Models side by side on the same tasks, with intervals."
    ),
    "up": CommandEntry("turnstile.cli.cluster:up", "Start servers in a Ray cluster."),
    "down": CommandEntry("turnstile.cli.cluster:down", "End the servers of a Ray cluster."),
    "agents": CommandEntry(AGENTS, "Agents that a server can launch."),
    "episodes": CommandEntry(EPISODES, "List, show and export recorded episodes."),
    "ui": CommandEntry("turnstile.cli.ui:ui", "Open the server's viewer in a browser."),
    "engine": CommandEntry(ENGINE, "The engine: state, pauses, weights, adapters, sleep, workers."),
    "top": CommandEntry("turnstile.cli.top:top", "What the servers do now: rates, engines, running episodes."),
    "plan": CommandEntry("turnstile.cli.plan:plan", "What so many episodes need: servers, engines, hosts."),
    "mcp": CommandEntry(
        "turnstile.cli.mcp:mcp", "Serve the tools of an episode as an MCP server on standard input and output."
    ),
    "report": CommandEntry(
        "turnstile.cli.report:report", "A run as one HTML file: curves, tables, episodes with their tokens."
    ),
    "audit": CommandEntry(
        "turnstile.cli.audit:audit", "Re-score recorded tokens on the engine and check every invariant."
    ),
}


class Commands(CommandGroup):
    """The ``turnstile`` command."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(table=COMMANDS, added="turnstile.commands", **settings)


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    installed = distribution("turnstile-rl")
    typer.echo(f"turnstile {installed.version}")
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        # The code is whatever the folder holds now, so the number alone could mislead.
        typer.echo(f"editable: the code is that of {origin['url']}; the version is of its installation", err=True)
    raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Turn any agent into a source of token-exact episodes."""
