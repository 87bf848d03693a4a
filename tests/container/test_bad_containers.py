"""Containers that are set up wrongly: one line says what is wrong, whose uid it is, and what to run; exit code 2.

The same faults of a process without a container are in tests/start.
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_support import HARDENED, Container, sandbox_flags, serving, started
from image_builds import ENVIRONMENT, run

pytestmark = [pytest.mark.docker, pytest.mark.container, pytest.mark.anyio, pytest.mark.timeout(1500)]

CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
TRAINER = {"MODEL": "tiny", "ENGINE__KIND": "trainer"}
"""A server that starts at once: the training loop would be its engine."""


@pytest.fixture
def volume() -> Iterator[str]:
    name = f"turnstile-test-{secrets.token_hex(4)}"
    yield name
    run("docker", "volume", "rm", "-f", name)


def ended(image: str, *flags: str, command: tuple[str, ...] = (), **settings: str) -> tuple[int, str]:
    """Exit code and last line of complaint of a hardened container that ends by itself."""
    variables = [word for name, value in settings.items() for word in ("-e", f"TURNSTILE_{name}={value}")]
    done = subprocess.run(
        ["docker", "run", "--rm", *HARDENED, *variables, *flags, image, *command],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,  # in one pipe the lines of both come in any order: Docker copies each stream apart
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1]


def refusal(image: str, *flags: str, **settings: str) -> str:
    code, line = ended(image, *flags, **{**TRAINER, **settings})
    assert code == 2, line
    assert line.startswith("turnstile: ")
    return line


@pytest.mark.thorough
def test_a_volume_that_is_mounted_read_only(server_image: str, volume: str) -> None:
    line = refusal(server_image, "-v", f"{volume}:/data:ro")
    assert "the data directory /data cannot be written: it is on a read-only file system" in line
    assert "without `:ro`" in line


@pytest.mark.thorough
def test_a_folder_of_the_host_that_belongs_to_root(server_image: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    line = refusal(server_image, "-v", f"{tmp_path}:/data")
    owner = tmp_path.stat().st_uid
    assert f"/data belongs to uid {owner} (mode 755), and the server runs as uid 10001" in line
    assert (
        "Run `chown -R 10001:10001 /data` (for a container: on the folder or volume that is mounted there)" in line
    )


@pytest.mark.thorough
def test_another_user_than_the_volumes(server_image: str, volume: str) -> None:
    line = refusal(server_image, "-v", f"{volume}:/data", "--user", "1000:1000")
    assert "/data belongs to uid 10001" in line
    assert "the server runs as uid 1000" in line
    assert "`docker run --user 10001:10001`" in line


@pytest.mark.thorough
def test_a_disk_without_space(server_image: str) -> None:
    assert "its disk, or the quota on it, is full" in refusal(server_image, "--tmpfs", "/data:uid=10001,size=16k")


@pytest.mark.thorough
def test_no_model(server_image: str, volume: str) -> None:
    code, line = ended(server_image, "-v", f"{volume}:/data", ENGINE__KIND="sglang")
    assert code == 2
    assert line.startswith("turnstile: no model: --model DIR (TURNSTILE_MODEL) names a ")


@pytest.mark.thorough
def test_a_model_that_its_user_cannot_read(server_image: str, volume: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    line = refusal(server_image, "-v", f"{volume}:/data", "-v", f"{tmp_path}:/model:ro", MODEL="/model")
    assert "the model folder /model cannot be read by uid 10001" in line


@pytest.mark.thorough
def test_an_engine_that_cannot_be_reached(server_image: str, volume: str) -> None:
    url = "http://127.0.0.1:30000"
    settings = {"ENGINE__KIND": "sglang", "ENGINE__URL": url, "ENGINE__START_TIMEOUT_S": "1"}
    line = refusal(server_image, "-v", f"{volume}:/data", **settings)
    assert f"The engine at {url} was not ready within engine.start_timeout_s (1 s)" in line
    assert "In a container this address is the container itself." in line


@pytest.mark.thorough
async def test_a_volume_that_another_container_has(server_image: str) -> None:
    async with serving(server_image, **TRAINER) as container:
        line = refusal(server_image, "--volumes-from", container.name)
        assert "is in use by process 1 on " in line
        assert f"process 1 on {run('docker', 'inspect', '-f', '{{.Config.Hostname}}', container.name)}" in line


@pytest.mark.thorough
async def test_a_root_without_tmp_is_enough(server_image: str) -> None:
    """Sockets are in /data then."""
    hardened = tuple(word for word in HARDENED if word not in {"--tmpfs", "/tmp"})
    with started(server_image, *sandbox_flags(), hardened=hardened, **TRAINER) as container:
        await container.ready()
        assert "sandboxes: local: bubblewrap" in container.log
        assert "/data/turnstile-" in container.run("sh", "-c", "ls -d /data/turnstile-*")


@pytest.mark.thorough
async def test_agents_where_nothing_can_be_run_are_refused_as_infrastructure(server_image: str) -> None:
    """`--tmpfs` is noexec where the flag does not say otherwise."""
    in_memory = ("--tmpfs", "/data:uid=10001,mode=700")
    code, line = ended(server_image, *in_memory, command=("turnstile", "agents", "install", "mini-swe-agent"))
    assert code == 1
    assert line.startswith(
        "turnstile: agent mini-swe-agent cannot run: agents are installed in /data/agents, which is "
    )
    assert "mounted noexec" in line
    container = Container(f"turnstile-test-{secrets.token_hex(4)}", secrets.token_urlsafe(24))
    settings = {"CONTROL_KEY": container.key, **TRAINER}
    variables = [word for name, value in settings.items() for word in ("-e", f"TURNSTILE_{name}={value}")]
    published = ("-p", "127.0.0.1::8000")
    run(
        *("docker", "run", "-d", "--name", container.name, *HARDENED, *sandbox_flags(), *in_memory, *published),
        *(*variables, server_image),
    )
    try:
        await container.ready()
        assert "launched agents will be refused: agents are installed in /data/agents, which is " in container.log
        async with container.client() as client:
            [rollout] = [
                rollout
                async for rollout in client.rollouts([{"instruction": "x"}], agent="mini-swe-agent", retries=0)
            ]
        assert rollout.error is not None
        assert (rollout.error.type, rollout.error.fault) == ("agent_not_installed", "infrastructure")
    finally:
        run("docker", "rm", "-f", container.name)


@pytest.mark.thorough
@pytest.mark.slow
def test_agents_of_both_kinds_are_installed_below_data_by_a_hardened_container(
    server_image: str, volume: str, tmp_path: Path
) -> None:
    """npm agents too, in an image without npm; /tmp is noexec."""
    spec = (
        "name: packed\nversion: '1'\nsummary: Has a package.\ncommand: ['true']\ninstall: {pip: [sniffio==1.3.1]}"
    )
    tmp_path.chmod(0o755)
    (tmp_path / "packed.yaml").write_text(spec)
    # A private CA of this machine's; elsewhere the same certificates as the image's.
    trusted = ("-v", f"{CERTIFICATES}:/run/ca.pem:ro", "-e", "PIP_CERT=/run/ca.pem")
    trusted += ("-e", "NODE_EXTRA_CA_CERTS=/run/ca.pem")
    trusted += ("-v", f"{tmp_path}:/specs:ro", "-e", 'TURNSTILE_AGENTS__SPECS=["/specs"]')
    install = ("docker", "run", "--rm", *HARDENED, *trusted, "-v", f"{volume}:/data", server_image)
    said = run(*install, "turnstile", "agents", "install", "packed", "pi", timeout_s=600)
    assert "packed 1 is installed: /data/agents/packed-" in said
    assert "is installed: /data/agents/pi-" in said
    again = run(*install, "turnstile", "agents", "install", "pi")
    assert "was installed before" in again
