"""Which backend the settings and the machine give, and what is said where there is none. Needs no Docker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pool_support import NO_AGENTS, MemoryProvider, spec

from turnstile_server.errors import SandboxUnavailable, StartupError
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.first_that_works import FirstThatWorks
from turnstile_server.sandboxes.protocol import ProviderSetup
from turnstile_server.sandboxes.registry import create_provider
from turnstile_server.settings import SandboxSettings

pytestmark = pytest.mark.anyio


class Broken(MemoryProvider):
    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        raise StartupError(f"{self.name} is not installed")


def no_engine(run_dir: Path) -> str:
    return f"unix://{run_dir}/none.sock"


async def test_docker_asked_for_by_name_without_an_engine_does_not_start(
    run_dir: Path, tasks: BackgroundTasks
) -> None:
    settings = SandboxSettings(kind="docker", docker_host=no_engine(run_dir))
    provider = create_provider(ProviderSetup(settings, run_dir, "owner"))
    with pytest.raises(StartupError, match="Start Docker"):
        await provider.start(NO_AGENTS, tasks)
    await provider.close()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("absent_module:create", "No module named 'absent_module'"),
        ("pathlib:Path.cwd", "cannot be made: TypeError"),
        ("builtins:str", "it is a str, and no SandboxProvider"),
    ],
)
def test_a_backend_that_cannot_be_used_is_told_by_its_place(run_dir: Path, kind: str, said: str) -> None:
    with pytest.raises(StartupError, match=said) as failed:
        create_provider(ProviderSetup(SandboxSettings(kind=kind), run_dir, "owner"))
    assert f"sandboxes.kind: the sandbox backend {kind} " in failed.value.message


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("harbor", "harbor:NAME names one of Harbor's environments: harbor:docker"),
        ("harbor:", "harbor:NAME names one of Harbor's environments"),
        ("docker:python", "docker takes nothing after its name, so 'docker:python' is none"),
        ("none:else", "none takes nothing after its name"),
    ],
)
def test_what_follows_a_backends_name_is_its_own_or_refused(run_dir: Path, kind: str, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        create_provider(ProviderSetup(SandboxSettings(kind=kind), run_dir, "owner"))


async def test_harbors_environments_say_what_they_lack(
    run_dir: Path, tasks: BackgroundTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refusal(**given: str) -> str:
        settings = SandboxSettings.model_validate({"kind": "harbor:docker", **given})
        provider = create_provider(ProviderSetup(settings, run_dir, "owner"))
        with pytest.raises(StartupError) as refused:
            await provider.start(NO_AGENTS, tasks)
        await provider.close()
        return refused.value.message

    assert "needs sandboxes.link_address: HOST:PORT" in await refusal()
    assert "is HOST:PORT, and 'here' is not" in await refusal(link_address="here")
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    assert "needs Python 3.12 or newer, as Harbor does" in await refusal(link_address="10.0.0.1:4800")
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    monkeypatch.setitem(sys.modules, "harbor", None)
    assert "pip install 'turnstile-rl[harbor]' 'harbor[docker]'" in await refusal(link_address="10.0.0.1:4800")


async def test_none_refuses_every_sandbox_and_says_which_setting_to_change(
    run_dir: Path, tasks: BackgroundTasks
) -> None:
    provider = create_provider(ProviderSetup(SandboxSettings(kind="none"), run_dir, "owner"))
    await provider.start(NO_AGENTS, tasks)
    assert provider.name == "none"
    with pytest.raises(SandboxUnavailable, match=r"sandboxes\.kind"):
        await provider.create(spec())
    await provider.close()


async def test_the_first_backend_that_starts_is_taken_and_the_others_are_closed(tasks: BackgroundTasks) -> None:
    broken, first, second = Broken(name="broken"), MemoryProvider(name="first"), MemoryProvider(name="second")
    provider = FirstThatWorks([lambda: broken, lambda: first, lambda: second])
    await provider.start(NO_AGENTS, tasks)
    assert provider.name == "first"
    assert broken.closed
    await provider.create(spec())
    assert (len(first.open), second.attempts) == (1, 0)
    await provider.close()
    assert first.closed


async def test_where_nothing_starts_the_server_serves_on_and_says_all_that_could_be_installed(
    tasks: BackgroundTasks,
) -> None:
    provider = FirstThatWorks([lambda: Broken(name="docker"), lambda: Broken(name="bubblewrap")])
    await provider.start(NO_AGENTS, tasks)
    with pytest.raises(SandboxUnavailable, match="bubblewrap is not installed; docker is not installed"):
        await provider.create(spec())
    await provider.close()


async def test_auto_without_an_engine_never_fails_to_start(run_dir: Path, tasks: BackgroundTasks) -> None:
    settings = SandboxSettings(kind="auto", docker_host=no_engine(run_dir))
    provider = create_provider(ProviderSetup(settings, run_dir, "owner"))
    await provider.start(NO_AGENTS, tasks)
    assert provider.name in {"local", "none"}
    await provider.close()
