"""The program that runs inside every sandbox: ``python3 -I -S -B /turnstile/helper``, standard library only, 3.8+.

The server imports nothing of it but ``turnstile_helper.frames``, the wire format that both ends share.
"""

from __future__ import annotations

from pathlib import Path

HELPER_FOLDER = Path(__file__).parent
"""What backends mount read-only."""

HELPER_TARGET = "/turnstile/helper"
"""Where they mount it."""

SOCKET_TARGET = "/run/turnstile"
"""Where they mount a sandbox's socket folder, read-only (which does not keep a socket from being connected to)."""

TOKEN_VARIABLE = "TURNSTILE_HELPER_TOKEN"
SOCKET_VARIABLE = "TURNSTILE_HELPER_SOCKET"
"""Environment variables of the helper's own process; no command inherits them."""
