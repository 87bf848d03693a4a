"""How reasoning travels in ``encrypted_content`` of a Responses item.

Not encrypted, and no secret: it is the model's own text, framed so that it is told from what another server made.
Agents carry it back unchanged, also those that show, shorten or drop the summary.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "turnstile-v1."


def sealed(reasoning: str) -> str:
    return _MARK + base64.b64encode(reasoning.encode()).decode()


def unsealed(content: str) -> str | None:
    """The reasoning in what ``sealed`` made; None for anything else."""
    if not content.startswith(_MARK):
        return None
    try:
        return base64.b64decode(content[len(_MARK) :], validate=True).decode()
    except (binascii.Error, ValueError):  # cut or changed on the way
        return None
