"""The checkout that examples and tests run in, and the random-weight model that they make once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TURNSTILE = str(Path(sys.executable).with_name("turnstile"))
"""The installed command."""
MAKER = ROOT / "examples" / "make_tiny_model.py"


def tiny_model(seed: int = 1, *options: str) -> Path:
    """The folder of the random-weight model with ``seed``: made once, kept in .cache until its maker changes.
    ``options``: further flags of the maker."""
    digest = hashlib.sha256(MAKER.read_bytes()).hexdigest()[:12]
    folder = ROOT / ".cache" / "".join((f"tiny-{digest}-{seed}", *options))
    if not (folder / "tokenizer.json").exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        subprocess.run([sys.executable, MAKER, partial, "--seed", str(seed), *options], check=True)
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            if not (folder / "tokenizer.json").exists():
                raise
    return folder
