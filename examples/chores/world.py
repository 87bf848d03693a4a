"""Plays a chore in memory, for demonstrations: the tools answer as those of the MCP endpoint do (a test compares
them) to the calls that demonstrators make."""

from __future__ import annotations

import json
import re
from typing import Final

from tiny_policy.world import World
from turnstile.models import ToolCall

_SEARCH: Final = re.compile(r"grep -l (\w+) \*\.txt", re.ASCII)
_SUM: Final = re.compile(r"echo \$\(\((\d+(?:\+\d+)*)\)\)", re.ASCII)


class ChoreWorld(World):
    def call(self, call: ToolCall) -> str:
        match call.name, json.loads(call.arguments):
            case "bash", {"command": str(command)} if found := _SEARCH.fullmatch(command):
                names = sorted(name for name, text in self.files.items() if found[1] in text)
                return "".join(f"{name}\n" for name in names) + f"[exit status {0 if names else 1}]"
            case "bash", {"command": str(command)} if found := _SUM.fullmatch(command):
                return f"{sum(map(int, found[1].split('+')))}\n[exit status 0]"
            case "edit_file", {"path": str(path), "old": str(old), "new": str(new)} if (
                self.files.get(path, "").count(old) == 1
            ):
                self.files[path] = self.files[path].replace(old, new)
                return f"Replaced 1 occurrence in {path}."
        return super().call(call)
