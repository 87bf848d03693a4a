"""Tools of a user's own: Python functions and mounted MCP servers. Tool files import from here.

Read in this order: ``declare`` (what users write), ``catalog`` (all own tools of the server), ``build``, ``load``
and ``names`` (from the settings to tools, and what is refused), ``signature`` (a function's schemas), ``host``
with ``threads``, and ``in_sandbox`` (functions), ``mounted``, ``mounted_server``, ``stdio``, ``http_streams`` and
``server_link`` (MCP servers). ``bounds`` has the constants.
"""

from turnstile_server.own_tools.declare import CommandOutput, EpisodeState, ToolContext, ToolSandbox, tool

__all__ = ["CommandOutput", "EpisodeState", "ToolContext", "ToolSandbox", "tool"]
