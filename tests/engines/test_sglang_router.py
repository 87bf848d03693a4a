"""SGLang's router in the place of an engine is refused with the addresses of the engines behind it: on its
recorded answers (sglang-router 0.3.2), and on the real one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from scripted_engine import recording
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from control_support import running_app
from sglang_server import VARIABLE
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.errors import StartupError
from turnstile_server.settings import EngineSettings
from waiting import wait_until_sync

pytestmark = pytest.mark.anyio

SETTINGS = EngineSettings(kind="sglang", control_timeout_s=5.0, start_timeout_s=5.0)
START_S = 60.0


@contextmanager
def standing_in(workers: Any, status: int = 200) -> Iterator[str]:
    """A server that answers ``/workers`` and is empty 404 else, as the router is."""
    routes = [Route("/workers", lambda _: JSONResponse(workers, status))]
    missing = {404: lambda *_: Response(status_code=404)}
    with running_app(Starlette(routes=routes, exception_handlers=missing)) as url:
        yield url


async def refusal(url: str) -> str:
    """What the start says."""
    engine = SGLangEngine(url, SETTINGS, vocab_size=4160)
    try:
        with pytest.raises(StartupError) as caught:
            await engine.start()
    finally:
        await engine.close()
    return str(caught.value)


async def test_a_router_is_refused_with_the_engines_behind_it() -> None:
    with standing_in(recording("router_workers")) as url:
        said = await refusal(url)
    assert "SGLang's router" in said
    assert said.endswith("--engine-url http://127.0.0.1:60135 --engine-url http://127.0.0.1:44127")


async def test_of_many_engines_a_few_are_named_and_the_rest_counted() -> None:
    with standing_in({"workers": [{"url": f"http://engine-{at}"} for at in range(11)]}) as url:
        said = await refusal(url)
    assert said.count("--engine-url http") == 8
    assert said.endswith("(and 3 more)")


async def test_a_router_without_engines_is_one() -> None:
    with standing_in({"workers": []}) as url:
        assert "It has no engines yet" in await refusal(url)


@pytest.mark.parametrize("answer", [({"workers": 3}, 200), ([], 200), ({"workers": []}, 401)])
async def test_what_is_no_router_is_refused_for_what_it_said(answer: tuple[Any, int]) -> None:
    with standing_in(*answer) as url:
        said = await refusal(url)
    assert "no SGLang server" in said
    assert "404" in said


@pytest.fixture(scope="module")
def router_url(sglang_url: str) -> Iterator[str]:
    """A real router in front of a real engine."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        port, metrics = one.getsockname()[1], two.getsockname()[1]
    command = [os.environ[VARIABLE], "-m", "sglang_router.launch_router", "--worker-urls", sglang_url]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:

        def has_an_engine() -> bool:
            assert process.poll() is None, "is sglang-router of scripts/sglang-cpu.txt installed?"
            return asked(f"{url}/workers").get("total") == 1

        wait_until_sync(has_an_engine, within_s=START_S)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def asked(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer; ``{"status": …}`` of one that is an error, ``{}`` where nobody listens."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            value: dict[str, Any] = json.load(answer)
            return value
    except urllib.error.HTTPError as error:
        return {"status": error.code}
    except OSError:
        return {}


@pytest.mark.thorough
@pytest.mark.sglang
@pytest.mark.timeout(300)
async def test_the_real_router_is_refused_with_its_engine(router_url: str, sglang_url: str) -> None:
    said = await refusal(router_url)
    assert "SGLang's router" in said
    assert said.endswith(f"--engine-url {sglang_url}")


@pytest.mark.thorough
@pytest.mark.sglang
@pytest.mark.timeout(300)
async def test_calls_pass_through_the_real_router_and_control_does_not(router_url: str) -> None:
    """Where this fails, a newer router may be one to work with."""
    call = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    assert asked(f"{router_url}/generate", call)["meta_info"]["completion_tokens"] == 2
    for path in (
        "abort_request",
        "pause_generation",
        "continue_generation",
        "update_weights_from_disk",
        "tokenize",
    ):
        assert asked(f"{router_url}/{path}", {}) == {"status": 404}, path
    for path in ("model_info", "server_info", "v1/loads"):
        assert asked(f"{router_url}/{path}") == {"status": 404}, path
