"""The OpenAI Responses dialect.

``request`` reads a body, ``tools`` its tools; ``items`` makes the objects of a reply, ``reply`` writes replies
and streams of them.
"""

from turnstile_server.gate.dialects.responses.reply import ResponsesDialect as ResponsesDialect
