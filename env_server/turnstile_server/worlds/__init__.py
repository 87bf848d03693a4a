"""Tasks that are Python classes: an author imports ``World`` and ``tool``, and what they need, from here.

Their code is the room ``kinds/worlds``; docs/worlds.md says how to write, test and prove a world, and
``examples/worlds`` has some.
"""

from turnstile_server.kinds.worlds.declare import tool
from turnstile_server.kinds.worlds.world import (
    Scores,
    Start,
    ToolError,
    World,
    WorldSandbox,
    WorldTask,
)
from turnstile_server.own_tools import CommandOutput

__all__ = ["CommandOutput", "Scores", "Start", "ToolError", "World", "WorldSandbox", "WorldTask", "tool"]
