"""The tool door: a standard MCP server per episode."""
