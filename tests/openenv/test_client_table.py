"""The table of clients and calls in docs/openenv.md is what a server answers today.

``TURNSTILE_WRITE_DOCS=1`` writes the table instead.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from client_table import CLIENTS, SOURCE, gymnasium_env, printed, rendered, write

from control_support import OpenDoor
from training_support import trainer_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_the_table_in_the_docs_is_what_the_clients_get(
    open_door: OpenDoor, tiny_model: Path, tmp_path: Path
) -> None:
    assert shutil.which("bwrap"), "install bubblewrap: the suites' sandboxes are made with it"
    (tmp_path / "tasks.yaml").write_text(SOURCE)
    tasks = {"sources": [str(tmp_path / "tasks.yaml")]}
    rows = {}
    for name, play in CLIENTS.items():
        with open_door(sandboxes={"kind": "local"}, tasks=tasks) as door:
            rows[name] = await play(door.url, door.key)
    with trainer_server(tiny_model, tmp_path / "trainer", sandboxes={"kind": "local"}, tasks=tasks) as server:
        rows["`turnstile.gym`"] = await gymnasium_env(server.url, server.key)
    table = rendered(rows)
    if "TURNSTILE_WRITE_DOCS" in os.environ:
        write(table)
    assert printed() == table, "docs/openenv.md is stale: run this test with TURNSTILE_WRITE_DOCS=1"
