"""Dialects: the wire formats that agents speak, in and out. Pure: data in, data out, no I/O.

``base`` is the seam, ``registry`` has the dialects by name, ``router`` is the way from a path to one of them.
Each dialect is a module (``chat``) or a package (``anthropic``, ``responses``, ``gemini``: ``request`` reads,
``reply`` writes). ``json`` and ``openai`` hold what several of them share. ``read_body`` reads a body, and
``parse_cache`` cuts it where it differs from those before: ``json_lists`` finds its parts, ``conversations`` and
``tool_lists`` keep them.
"""
