"""The network of whole episodes: by phase, refused above the ceiling, and recorded with the episode."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from conversation import END
from egress_support import Hosts, Names
from gate_support import Stage, says, staged
from light import LIGHT, TASK

from bounded import bounded_settings
from turnstile import AsyncClient
from turnstile.models import NetworkOutcome, NetworkReport
from turnstile_server.agents.registry import AgentRegistry
from turnstile_server.backends import build_backends
from turnstile_server.errors import StartupError
from turnstile_server.settings import Settings
from waiting import wait_until

pytestmark = pytest.mark.anyio
SECRET = "s3cr3t-in-a-path"


@asynccontextmanager
async def server(model: Path, folder: Path, names: Names, hosts: Hosts, **egress: Any) -> AsyncIterator[Stage]:
    allowed = {"allow": [f"*.test:{hosts.http}"], "allow_addresses": ["127.0.0.0/8"]}
    wanted: dict[str, Any] = {
        "sandboxes": {"kind": "local"},
        "agents": {"install_dir": folder / "installs"},
        "egress": {**allowed, **egress},
    }
    work = build_backends(bounded_settings(**{"model": model, "data_dir": folder / "data", **wanted}), names)
    work = replace(work, agents=AgentRegistry({LIGHT.name: LIGHT}))
    async with staged(model, folder / "data", work=work, **wanted) as stage:
        stage.engine.answers = [says([*stage.encode("hm"), *stage.encode(END)])]
        yield stage


def fetch(url: str, into: str) -> str:
    """A page of Python that writes what a URL gives, or how it was refused, into a file."""
    return (
        "import urllib.request, urllib.error\n"
        f"try: text = urllib.request.urlopen('{url}', timeout=20).read().decode()\n"
        "except urllib.error.HTTPError as error: text = error.read().decode()\n"
        "except OSError as error: text = str(error)\n"
        f"open('{into}', 'w').write(text)\n"
    )


async def ended(stage: Stage, created: dict[str, Any]) -> dict[str, Any]:
    with anyio.fail_after(200):
        while True:
            shown: dict[str, Any] = await stage.get(created, "?wait=5")
            if shown["timings"]["ended_s"] is not None:
                return shown


@pytest.mark.slow
async def test_an_episode_reaches_the_hosts_of_each_phase_and_its_record_says_what(
    tiny_model: Path, tmp_path: Path, names: Names, hosts: Hosts
) -> None:
    mirror, other = f"mirror.test:{hosts.http}", f"other.test:{hosts.http}"
    test = (
        "import os, unittest\n"
        "class T(unittest.TestCase):\n"
        "    def test_answer(self):\n"
        "        self.assertIn('GET /pkg', open('made.txt').read())\n"
        "        self.assertNotIn('HTTP_PROXY', os.environ)\n"
        "        self.assertIn('GET /seen', open('seen.txt').read())\n"
        "        self.assertIn('not on the allow-list', open('refused.txt').read())\n"
    )
    task = {
        **TASK,
        "setup": [f'python3 -c "{fetch(f"http://{mirror}/pkg", "made.txt")}"'],
        "tests": {"files": {"inline": {"test_it.py": test}}, "expected": ["test_it.T.test_answer"]},
        "network": {"setup": [mirror], "agent": [other]},
    }
    work = fetch(f"http://{other}/seen?key={SECRET}", "seen.txt") + fetch(f"http://{mirror}/", "refused.txt")
    async with server(tiny_model, tmp_path, names, hosts) as stage:
        created = await stage.episode(task=task, agent="light", env={"WORK": work})
        shown = await ended(stage, created)
        assert (shown["status"], shown["reward"]) == ("completed", 1.0), shown
        async with AsyncClient(str(stage.control.base_url)) as client:
            report = await client.network(created["episode_id"])
        counted = (await stage.control.get("/metrics")).text
        assert 'turnstile_network_connections_total{outcome="ok"} 3.0' in counted
        assert 'turnstile_network_connections_total{outcome="host"} 1.0' in counted
        assert f'turnstile_network_bytes_total{{direction="down"}} {float(report.bytes_down)}' in counted
    assert [(each.phase, each.host, each.outcome) for each in report.decisions] == [
        ("setup", "mirror.test", NetworkOutcome.OK),
        ("agent", "other.test", NetworkOutcome.OK),
        ("agent", "mirror.test", NetworkOutcome.HOST),
        ("setup", "mirror.test", NetworkOutcome.OK),
    ]
    assert (report.allowed, report.refused, report.further) == (3, 1, 0)
    files = [path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in text for text in files)
    async with server(tiny_model, tmp_path, names, hosts) as stage:  # of a server that has started again
        again = await stage.control.get(f"/episodes/{created['episode_id']}/network")
        assert NetworkReport.model_validate_json(again.content) == report
        await stage.control.delete(f"/episodes/{created['episode_id']}")
        assert (await stage.control.get(f"/episodes/{created['episode_id']}/network")).status_code == 404


@pytest.mark.slow
async def test_the_end_of_an_episode_cuts_its_connections(
    tiny_model: Path, tmp_path: Path, names: Names, hosts: Hosts
) -> None:
    mirror = f"mirror.test:{hosts.http}"
    task = {**TASK, "network": {"allow": [mirror]}}
    async with server(tiny_model, tmp_path, names, hosts, max_decisions=1) as stage:
        work = fetch(f"http://{mirror}/one", "one") + fetch(f"http://{mirror}/silent", "none")
        created = await stage.episode(task=task, agent="light", env={"WORK": work})
        await wait_until(lambda: len(hosts.requests) == 2)
        path = f"/episodes/{created['episode_id']}"
        running = NetworkReport.model_validate_json((await stage.control.get(f"{path}/network")).content)
        assert (len(running.decisions), running.further) == (1, 1)
        await stage.control.post(f"{path}/cancel")
        stored = NetworkReport.model_validate_json((await stage.control.get(f"{path}/network")).content)
        assert (len(stored.decisions), stored.further, stored.allowed) == (1, 1, 2)
        counted = (await stage.control.get("/metrics")).text
        assert "turnstile_network_connections_open 0.0" in counted
        assert 'turnstile_network_connections_total{outcome="ended"} 1.0' in counted


@pytest.mark.slow
async def test_a_task_that_asks_for_more_than_the_server_allows_is_refused(
    tiny_model: Path, tmp_path: Path, names: Names, hosts: Hosts
) -> None:
    async with server(tiny_model, tmp_path, names, hosts) as stage:
        body = {"task": {**TASK, "network": {"allow": ["github.com", "a.test"]}}, "agent": "light"}
        refused = await stage.control.post("/episodes", json=body)
        assert refused.status_code == 422
        assert "network.allow: github.com is above this server's ceiling (egress.allow)" in refused.text
        body["task"] = {**TASK, "network": {"allow": ["https://github.com"]}}
        wrong = await stage.control.post("/episodes", json=body)
        assert wrong.status_code == 422
        assert "write its host alone" in wrong.text
        plain = await stage.episode(task=TASK)
        assert (await stage.control.get(f"/episodes/{plain['episode_id']}/network")).json()["decisions"] == []


def test_a_task_file_that_asks_for_more_stops_the_start_and_a_bad_pattern_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "tasks" / "task.yaml"
    file.parent.mkdir()
    head = "id: one\ninstruction: Say four.\nanswer: {value: four}\nnetwork:\n  allow:\n"
    file.write_text(head + "    - pypi.org\n")
    settings = Settings(data_dir=tmp_path, tasks={"sources": [str(file.parent)]})
    with pytest.raises(StartupError, match=r"task one .* network\.allow: pypi\.org is above .* \(egress\.allow\)"):
        build_backends(settings)
    file.write_text(head + '    - pypi.org\n    - "py*.org"\n')
    with pytest.raises(StartupError, match=r"task\.yaml:7.*network\.allow\.1.*before the first dot"):
        build_backends(settings)
