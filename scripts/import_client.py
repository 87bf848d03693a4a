"""Imports every module of the thin client, in an installation without extras (scripts/lowest.py).

A module may lack a package of the extra that it is for; anything else that fails is printed, with exit status 1.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import turnstile

OF_EXTRAS = frozenset(
    {"agentlightning", "areal", "datasets", "gymnasium", "openenv", "pyarrow", "ray", "tensorboardX", "torch"}
    | {"trl", "verifiers", "verl", "wandb"}
)


def main() -> int:
    failed = 0
    imported = []
    for module in pkgutil.walk_packages(turnstile.__path__, "turnstile.", onerror=lambda _: None):
        if module.name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in OF_EXTRAS:
                failed += 1
                print(f"{module.name}: {error}", file=sys.stderr)
        else:
            imported.append(module.name)
    print(f"imported {len(imported)} modules")
    return 1 if failed or not imported else 0


if __name__ == "__main__":
    sys.exit(main())
