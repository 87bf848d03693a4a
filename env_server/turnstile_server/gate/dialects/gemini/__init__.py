"""The Gemini dialect.

``schema`` reads fields and tools, ``request`` a body; ``reply`` writes replies and streams of them.
"""

from turnstile_server.gate.dialects.gemini.reply import GeminiDialect as GeminiDialect
