"""Tasks that are Python classes. An author imports ``World`` and ``tool``, and what they need, from here.

Read ``world`` first (what a world is, method by method), then ``declare`` (``@tool``), ``definition`` and
``load`` (finding and checking worlds when a server starts), ``episode_world`` (one episode's world, from reset to
close), ``thread`` (where its code runs), ``served`` (its tools), ``sandbox`` (its view of the sandbox) and
``scores`` (what ``grade`` gives).
"""

from turnstile_server.own_tools import CommandOutput
from turnstile_server.worlds.declare import tool
from turnstile_server.worlds.world import (
    Scores,
    Start,
    ToolError,
    World,
    WorldSandbox,
    WorldTask,
)

__all__ = ["CommandOutput", "Scores", "Start", "ToolError", "World", "WorldSandbox", "WorldTask", "tool"]
