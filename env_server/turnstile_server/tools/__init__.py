"""Tools: a standard MCP server per episode, and the five tools that it serves.

Read in this order: ``endpoint`` (the ASGI application), ``sessions`` (the sessions of one episode),
``mcp_request`` (one HTTP request), ``events`` (what can be fetched again after a lost connection), ``progress``,
``toolbox`` (the path of a tool call), ``arguments`` and ``functions`` (the tools), ``protocol`` (what it needs of
the episodes). ``bounds`` has the constants.
"""
