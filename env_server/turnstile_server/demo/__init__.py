"""The demo and what it plays with: a tiny policy, its task family, a server for the length of a block.

``turnstile demo`` and the repository's examples use it. In reading order:

- ``tiny/``: the model folder of the tiny policy, a Qwen3 of a million parameters (package data).
- ``errands``: the tasks that the tiny policy knows.
- ``local_server``: runs ``turnstile serve`` as a child process and checks that nothing stays behind.
- ``checks``: what must hold for every recorded episode, the audit included.
- ``play``: the demo itself.

The demo plays the part of a trainer, so ``checks`` and ``play`` use the client, which no other package of the
server does. Only the command ``turnstile demo`` imports them.
"""

from __future__ import annotations

from pathlib import Path

TINY = Path(__file__).with_name("tiny")
"""Model folder (Hugging Face layout) of the tiny policy."""

SHIPPED_MODELS = {"tiny": TINY}
"""Model folders by the names that ``--model`` and ``TURNSTILE_MODEL`` take beside paths."""


def model_folder(model: Path) -> Path:
    """The folder that ``model`` names: a shipped model by its name, else a path.

    A folder of the same name in the working directory wins, as it does in ``from_pretrained``.
    """
    shipped = SHIPPED_MODELS.get(str(model))
    return model if shipped is None or model.is_dir() else shipped
