from __future__ import annotations

from control_support import engine, open_door

__all__ = ["engine", "open_door"]
