"""``turnstile agents list``: the agents that a server can launch."""

from __future__ import annotations

from turnstile.cli.connection import DataDirOption, JsonOption, KeyOption, UrlOption, connect
from turnstile.cli.output import Column, echo, echo_json, reported, show_table

SHARED_USER = "An agent that runs as `agent` shares its user with the model's commands: they can take its key."


def list_agents(
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """The agents of the server, or of each of several."""
    with reported(), connect(url, key, data_dir) as client:
        found = client.agents()
    columns = [
        Column("agent"),
        Column("version"),
        Column("installed"),
        Column("tools"),
        Column("runs as"),
        Column("what it is", "text"),
        *([Column("server")] if len(found) > 1 else []),
    ]
    rows = []
    for server, agents in found.items():
        for agent in agents.agents:
            if as_json:
                echo_json(agent.model_dump_json())
            installed, tools = ("yes" if agent.installed else "no"), ("yes" if agent.uses_tools else "no")
            of_server = [server] if len(found) > 1 else []
            rows.append([agent.name, agent.version, installed, tools, agent.user, agent.summary, *of_server])
    if not as_json:
        show_table(columns, rows)
        if any(agent.user == "agent" for agents in found.values() for agent in agents.agents):
            echo(SHARED_USER, err=True)
