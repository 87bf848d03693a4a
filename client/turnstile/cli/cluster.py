"""``turnstile up --ray`` and ``turnstile down --ray``: servers in a Ray cluster, which stay between the two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from turnstile.cli.connection import RAY_SCHEME
from turnstile.cli.output import USAGE, Column, echo, fail, reported, show_table
from turnstile.errors import InvalidRequest

if TYPE_CHECKING:
    from turnstile.ray import Cluster, EngineSource

NameOption = Annotated[str, typer.Option("--name", help="Of the servers together, in the Ray cluster.")]
RayOption = Annotated[
    bool, typer.Option("--ray", help="In the Ray cluster of this machine, or of RAY_ADDRESS.", show_default=False)
]
_COLUMNS = (Column("server"), Column("node"), Column("url"))


def up(
    ray: RayOption = False,
    name: NameOption = "turnstile",
    model: Annotated[
        str | None, typer.Option("--model", help="Hugging Face folder, on every node; `tiny`: the one that ships.")
    ] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="Which engine samples, as of `serve`.")] = None,
    engine_url: Annotated[
        list[str] | None, typer.Option("--engine-url", help="Base URL of a running engine; may be repeated.")
    ] = None,
    router: Annotated[
        str | None, typer.Option("--router", help="URL of sglang-router, such as slime's: its engines.")
    ] = None,
    verl: Annotated[bool, typer.Option("--verl", help="verl's rollout servers in this Ray cluster.")] = False,
    servers: Annotated[
        int | None, typer.Option("--servers", min=1, help="All together. Unless given, those per node.")
    ] = None,
    per_node: Annotated[int, typer.Option("--servers-per-node", min=1, help="On each node with room.")] = 1,
    cpus: Annotated[float, typer.Option("--cpus", min=0.0, help="Ray's CPUs for each server.")] = 1.0,
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", help="Folder on the nodes' disks; each has NAME/NUMBER in it.")
    ] = None,
    python: Annotated[
        str | None, typer.Option("--python", help="Interpreter on the nodes that has the server package.")
    ] = None,
    autoscale: Annotated[bool, typer.Option("--autoscale", help="Ask Ray's autoscaler for the nodes.")] = False,
    start_s: Annotated[float, typer.Option("--start-s", min=1.0, help="Longest wait, in seconds.")] = 300.0,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- FLAGS]...", help="Further flags of `turnstile serve`.")
    ] = None,
) -> None:
    """Start servers in a Ray cluster. They stay until `turnstile down`; Ctrl-C ends a start."""
    clusters = _clusters(ray)
    with reported():
        cluster = clusters.start(
            name,
            model=model,
            engine=engine,
            engines=_engines(engine_url, router, verl=verl),
            servers=servers,
            servers_per_node=per_node,
            resources={"CPU": cpus},
            data_dir=data_dir,
            python=python,
            autoscale=autoscale,
            start_s=start_s,
            flags=flags or (),
        )
        show_table(_COLUMNS, [(row.name, row.address, row.url or "") for row in cluster.servers()])
    echo(f"`turnstile top --url {RAY_SCHEME}{name}` shows them; so do all commands, and turnstile.ray", err=True)


def down(
    ray: RayOption = False,
    name: NameOption = "turnstile",
    drain_s: Annotated[
        float, typer.Option("--drain-s", min=0.0, help="Seconds for the episodes that run; 0: none.")
    ] = 0.0,
) -> None:
    """End the servers of a Ray cluster. Their data directories stay."""
    clusters = _clusters(ray)
    with reported():
        clusters.connect(name).close(drain_s)


def _clusters(ray: bool) -> type[Cluster]:
    if not ray:
        fail("say where: --ray", USAGE)
    try:
        from turnstile.ray import Cluster  # noqa: PLC0415 - an extra
    except ImportError as error:
        fail(str(error), USAGE)
    return Cluster


def _engines(urls: list[str] | None, router: str | None, *, verl: bool) -> EngineSource | list[str] | None:
    from turnstile.ray import Router, VerlServers  # noqa: PLC0415 - an extra

    given: list[EngineSource | list[str]] = [urls] if urls else []
    given += [Router(router)] if router else []
    given += [VerlServers()] if verl else []
    if len(given) > 1:
        raise InvalidRequest("take one of --engine-url, --router and --verl")
    return given[0] if given else None
