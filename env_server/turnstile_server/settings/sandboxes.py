"""Settings of the sandboxes and of the tools that run in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from turnstile_server.settings.machine import default_sandboxes, machine_resources
from turnstile_server.settings.own_tools import FunctionSpec, ServerSpec
from turnstile_server.settings.section import BoundedSection


class SandboxSettings(BoundedSection):
    """The sandboxes in which launched agents, tools and hidden tests run."""

    @property
    def places(self) -> int:
        """``max_open``, or its default on this machine."""
        return self.max_open or default_sandboxes(machine_resources())

    kind: str = Field(
        "auto",
        description="Backend: `docker`, `local`, `oci` (images without an engine), `kubernetes`, `harbor:NAME` "
        "(Harbor's environments), `none`, one that a package adds, or `auto`: Docker if its engine answers, else "
        "`local` if bubblewrap works, else none.",
    )
    allow_unisolated: bool = Field(
        False,
        description="Development only: without bubblewrap, `local` runs agents with the server's own rights; "
        "`harbor:NAME` takes environments whose network is open.",
    )
    docker_host: str | None = Field(
        None,
        description="Address of the Docker engine: `unix://`, `tcp://` or `ssh://`; none: `DOCKER_HOST`, then the "
        "context of Docker's client, then the default socket.",
    )
    docker_image: str = Field(
        "python:3.11-slim",
        description="`docker`, `oci`, `kubernetes`, `harbor`: the image for tasks that name none.",
    )
    docker_runtime: str | None = Field(
        None,
        description="`docker`: the engine's runtime for every sandbox, e.g. `runsc` (gVisor) or `kata`; none: the "
        "engine's default. One that the engine does not know stops the start.",
    )
    docker_runtime_memory_mb: int = Field(
        256,
        ge=0,
        description="`docker`, under a runtime with a kernel of its own: MiB added to a container's bound of "
        "memory, because the runtime's own memory counts to it.",
    )
    docker_runtime_pids: int = Field(
        2048,
        ge=0,
        description="The same for processes: gVisor needs about six threads of the host for each process inside.",
    )
    docker_timeout_s: float = Field(60.0, gt=0, description="Time for one call to the Docker engine.")
    docker_transport: Literal["auto", "bind", "stream"] = Field(
        "auto",
        description="How containers are reached: `bind`, over sockets of the server's that they mount; `stream`, "
        "over the engine's connection, for an engine that does not see the server's files. `auto` tries it.",
    )
    docker_python: Literal["auto", "carried", "image"] = Field(
        "auto",
        description="`docker`, `oci`, `kubernetes`, `harbor`: the Python that the helper, graders and agents run "
        "on. `carried`: one made of the server's own and mounted, so images need none; `image`: the image's; "
        "`auto`: carried where one can be made (x86-64, Debian or Ubuntu).",
    )
    docker_parallel: int = Field(4, ge=1, description="Calls to the Docker engine at once; further ones wait.")
    kubernetes_namespace: str | None = Field(
        None, description="Namespace of the pods; none: that of the kubeconfig's context, or of the server's pod."
    )
    kubernetes_pod: Path | None = Field(
        None,
        description="YAML file with a part of a Pod: labels, node selector, tolerations, runtime class, priority, "
        "pull secrets.",
    )
    link_address: str | None = Field(
        None,
        description="`harbor`: `HOST:PORT` at which sandboxes elsewhere dial this server, by TLS. It listens "
        "there, or at every address where the host is not this machine's own; worker N at the port PORT + N.",
    )
    harbor_options: dict[str, Any] = Field(
        default_factory=dict,
        description="`harbor`: options of the environment, as `harbor run --ek` takes them (JSON).",
    )
    run_dir: Path | None = Field(
        None,
        description="Folder of the sandboxes' Unix sockets; its path must be short. None: a folder in the "
        "temporary folder.",
    )
    memory_mb: int = Field(
        1024,
        ge=16,
        description="Memory of a sandbox in MiB: default and, where it is set, ceiling of what a task may ask "
        "for; else the ceiling is the machine's memory. The minimum in an agent's spec overrides it.",
    )
    cpus: float = Field(
        1.0,
        gt=0,
        description="CPUs of a sandbox: default and, where it is set, ceiling; else that is the machine's.",
    )
    pids: int = Field(
        256,
        ge=8,
        description="Processes of a sandbox: default and, where it is set, ceiling; else that is an eighth of the "
        "machine's process ids. The minimum in an agent's spec overrides it.",
    )
    disk_mb: int = Field(
        512,
        ge=1,
        description="Size in MiB of all that can be written in a sandbox together: work folder, homes, `/tmp`, "
        "`/dev/shm`. It lies in the sandbox's memory and is never more than half of that.",
    )
    disk_files: int = Field(
        65_536,
        ge=256,
        description="Files and folders in it, together; never more than 128 for each MiB of memory.",
    )
    open_files: int = Field(
        1024,
        ge=64,
        description="Descriptors of a command's process: its hard limit (`ulimit -Hn`). Never more than half of "
        "what the sandbox's helper may have: `local` as the server's own process, `docker` as the engine's "
        "containers.",
    )
    agent_uid: int = Field(61001, ge=1, description="User id of the model's commands; the work folder is its own.")
    tests_uid: int = Field(61002, ge=1, description="User id of hidden tests.")
    harness_uid: int = Field(61003, ge=1, description="User id of a launched agent's own process.")
    work_uid: int = Field(61004, ge=1, description="User id of the work while it is tested.")
    uid_range: int = Field(
        1_900_000_000,
        ge=0,
        le=2_000_000_000,
        description="First of the 67 million user ids from which each sandbox takes ids of its own, by chance, "
        "where the server is root or uses Docker. 0: all sandboxes have the four ids above.",
    )
    max_open: int | None = Field(
        None,
        ge=1,
        description="Sandboxes at once, warm ones included; further requests wait for a free one. None: room for "
        "the episodes and gradings of a machine like this one, 128 at least.",
    )
    wait_s: float = Field(600.0, gt=0, description="Time to wait for a free sandbox; then 503.")
    start_timeout_s: float = Field(
        60.0, gt=0, description="Time from the creation of a sandbox until its helper connects; then 503."
    )
    call_timeout_s: float = Field(
        30.0, gt=0, description="Time for the helper to answer a request that runs no command."
    )
    max_connections: int = Field(
        256,
        ge=1,
        description="Connections of one sandbox to the gate at once. An idle one makes way for a new one; where "
        "none is idle, new ones get 503.",
    )
    max_connections_total: int = Field(
        4096,
        ge=1,
        description="The same over all sandboxes, or a quarter of the process's descriptors if that is less. A "
        "sandbox gets at most as many as then stay free for the others.",
    )
    warm: int = Field(
        0, ge=0, description="Sandboxes kept ready for each of the two latest sandbox specs; 0 keeps none."
    )
    max_file_bytes: int = Field(
        16 << 20, ge=1024, description="Largest file that is read or written in one request."
    )
    max_archive_bytes: int = Field(
        64 << 20, ge=1024, description="Largest upload, and largest work folder that is fetched."
    )


class ToolSettings(BoundedSection):
    """The tools that agents get through the MCP endpoint."""

    command_timeout_s: float = Field(60.0, gt=0, description="`bash`: time for a command that names no time-out.")
    max_command_timeout_s: float = Field(
        600.0, gt=0, description="`bash`: the longest time-out a command may name."
    )
    max_output_chars: int = Field(
        16_000, ge=256, description="Longest result of `bash`; a longer one is cut in the middle."
    )
    separate_stderr: bool = Field(
        False,
        description="`bash`: keep standard error apart and show it after standard output. False: the two are one, "
        "in the order they came, as in a terminal.",
    )
    structured_results: bool = Field(
        True,
        description="Results have structured content beside their text, and tools an output schema. Some agents "
        "show their model the structured content instead of the text; False keeps text alone.",
    )
    instructions: str = Field(
        "These tools act in the sandbox of one task. Files stay from call to call; the current folder and "
        "variables of the shell do not. A result that is an error says what to change. Where the task asks for an "
        "answer, hand it in with `submit`.",
        max_length=20_000,
        description="What the MCP server says of itself to clients, which may show it to their model; empty: "
        "nothing.",
    )
    max_file_chars: int = Field(
        64_000, ge=256, description="Longest result of `read_file`; a longer one is cut, with a note."
    )
    max_file_bytes: int = Field(
        4 << 20, ge=1024, description="Largest file that `read_file`, `write_file` and `edit_file` accept."
    )
    max_answer_chars: int = Field(16_000, ge=16, description="Longest answer that `submit` accepts.")
    functions: tuple[FunctionSpec, ...] = Field(
        (), description="Python functions as tools of every episode ([own tools](own-tools.md))."
    )
    servers: tuple[ServerSpec, ...] = Field(
        (), description="MCP servers whose tools every episode gets ([own tools](own-tools.md))."
    )
    own_timeout_s: float = Field(
        60.0, gt=0, description="Time for one call of an own tool that names no time-out; then it is stopped."
    )
    own_max_timeout_s: float = Field(600.0, gt=0, description="The longest time-out that an own tool may name.")
    mount_start_timeout_s: float = Field(
        30.0, gt=0, description="Time for a mounted MCP server to start and name its tools."
    )
    own_max_text_chars: int = Field(
        64_000, ge=256, description="Longest text in the result of an own tool; a longer one is cut in the middle."
    )
    own_max_result_bytes: int = Field(
        8 << 20,
        ge=1024,
        description="Largest structured result of an own tool, images and other content included; a larger one is "
        "an error.",
    )
    max_calls_per_episode: int = Field(8, ge=1, description="Tool calls in flight per episode; more are refused.")
    stream_max_s: float | None = Field(
        None,
        gt=0,
        description="The response of a call that runs longer is closed, and the client comes back for the rest: "
        "for proxies that cut long responses. None: never.",
    )
    max_body_bytes: int = Field(
        4 << 20, ge=1024, description="Largest body of an MCP request; a larger one is 413."
    )
