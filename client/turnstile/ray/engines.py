"""The inference engines of a trainer, as URLs that a server reaches: listed, behind a router, or verl's actors.

None of it imports a trainer. SkyRL's engines are its list of URLs (``server_urls`` of its inference client, or its
``generator.inference_engine.external_server_urls``), which ``Cluster.start`` takes as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import httpx
import ray
import ray.exceptions
import ray.util

from turnstile import errors

ANSWER_S = 20.0
"""For a router, and for all of verl's actors together."""


class EngineSource(Protocol):
    """Tells where the engines are. It is sent to every node, and asked there each time that a server starts."""

    def urls(self) -> Sequence[str]:
        """Base URLs of engines of one kind and model. Blocks. Raises SetupFault where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class ListedEngines:
    """Engines that are given once."""

    listed: tuple[str, ...]

    def urls(self) -> Sequence[str]:
        return self.listed


@dataclass(frozen=True, slots=True)
class Router:
    """The engines behind sglang-router, such as slime's (``args.sglang_router_ip`` and ``_port``).

    ``GET /workers`` answers ``{"workers": [{"url", "worker_type", "is_healthy", …}]}`` (sglang-router 0.3.2;
    slime's ``slime/rollout/sglang_rollout.py`` reads the same). The router itself is no engine.
    """

    url: str

    def urls(self) -> Sequence[str]:
        asked = f"{self.url.rstrip('/')}/workers"
        try:
            answer = httpx.get(asked, timeout=ANSWER_S).raise_for_status().json()
            found = [
                str(worker["url"]).rstrip("/")
                for worker in answer["workers"]
                if worker.get("is_healthy", True) and worker.get("worker_type", "regular") == "regular"
            ]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise errors.SetupFault(f"the router of the engines does not answer: {asked}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise errors.SetupFault(f"{asked} is no list of sglang-router's workers: {error!r}") from error
        if not found:
            raise errors.SetupFault(f"the router at {self.url} has no healthy engine yet")
        return found


@dataclass(frozen=True, slots=True)
class VerlServers:
    """The rollout servers of verl in this Ray cluster. ``names``: a pattern of the actors' whole names.

    Read in verl 0.9.1: an actor is named ``vllm_server_{replica}_{node}``
    (``workers/rollout/vllm_rollout/vllm_async_server.py``, line 1367) or ``sglang_server_{replica}_{node}``
    (``sglang_rollout/async_sglang_server.py``, line 839), and ``get_server_address()`` gives ``(ip, port)`` (lines
    229 and 236). Of a replica over several nodes the first one serves. Servers of other models, as for rewards,
    have other names. vLLM takes token ids only where ``enable_scale_out`` is among verl's engine arguments.
    """

    names: str = r"(vllm|sglang)_server_\d+_0"

    def urls(self) -> Sequence[str]:
        every = ray.util.list_named_actors(all_namespaces=True)
        wanted = [each for each in every if re.fullmatch(self.names, each["name"])]
        if not wanted:
            raise errors.SetupFault(
                f"no actor of this Ray cluster is named {self.names}: are verl's rollout servers started?"
            )
        try:
            actors = [ray.get_actor(each["name"], namespace=each["namespace"]) for each in wanted]
            asked = [actor.get_server_address.remote() for actor in actors]
            found = ray.get(asked, timeout=ANSWER_S)
        except (ray.exceptions.RayError, ValueError, AttributeError) as error:
            names = ", ".join(each["name"] for each in wanted)
            raise errors.SetupFault(f"verl's actors {names} do not say where they serve: {error}") from error
        return [f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for host, port in found]
