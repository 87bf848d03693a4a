"""The Anthropic Messages dialect: ``request`` reads a body, ``reply`` writes replies, streams and errors."""

from turnstile_server.gate.dialects.anthropic.reply import AnthropicDialect as AnthropicDialect
