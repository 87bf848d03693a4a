"""Environments for TRL's synchronous ``GRPOTrainer``: TRL's loop is the agent, Turnstile has task, tools, grading.

``reset`` starts an episode with an external agent. The public methods are its tools: TRL offers them to the
model by signature and docstring. ``get_reward`` ends the episode and has its work graded. TRL samples and
tokenizes by itself: no call passes the model API, and the episode records no turns.

Tools are called at the episode's MCP endpoint, by MCP 2026-07-28, which takes one POST per call and no session,
so httpx is enough. OpenEnv's ``/step`` of the control API would do too, but it knows one server and starts its
episodes itself; the client adds several servers and retries.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from turnstile import errors
from turnstile._transport import client_arguments
from turnstile.exporters.trl.servers import TurnstileServers
from turnstile.models import EpisodeStatus, Limits
from turnstile.sync import Client, NewEpisodeHandle

_MCP = "2026-07-28"
_META = {
    "io.modelcontextprotocol/protocolVersion": _MCP,
    "io.modelcontextprotocol/clientCapabilities": {},
}
"""Part of every request of that version (MCP specification 2026-07-28, "Base protocol: _meta")."""
_LOOK_S = 0.1
"""Between two looks at an episode that is being prepared."""


class ToolFailed(Exception):
    """A tool call failed. TRL gives the text to the model and counts a failure."""


class AnswerEnvironment:
    """An episode whose only tool is ``submit``: for tasks without a sandbox. Made by TurnstileEnvironments."""

    def __init__(self, owner: TurnstileEnvironments) -> None:
        self._owner = owner
        self._episode: NewEpisodeHandle | None = None

    def reset(self, **row: Any) -> None:
        """Starts an episode of the row's ``task_id`` (or inline ``task``); an earlier one is cancelled.

        Raises InvalidRequest for a row without either, Timeout where the episode does not run after ``start_s``,
        and the client's errors.
        """
        self._cancel()
        task = row.get("task_id") or row.get("task")
        if not task:
            raise errors.InvalidRequest(f"the row names no task: it needs task_id or task, and has {sorted(row)}")
        self._episode = self._owner._begin(task)

    def get_reward(self) -> float | None:
        """Ends the episode and has it graded. None where it could not be: TRL leaves such a rollout out."""
        if self._episode is None:
            return None
        episode, self._episode = self._episode, None
        return episode.finish().reward

    def submit(self, answer: str) -> str:
        """Hand in the answer to the task. The last one counts.

        Args:
            answer: The answer.

        Returns:
            Whether it was accepted.
        """
        return self._call("submit", answer=answer)

    def _call(self, tool: str, **arguments: Any) -> str:
        if self._episode is None:
            raise ToolFailed("there is no episode: it has been graded, or was never begun")
        return self._owner._call(self._episode, tool, {k: v for k, v in arguments.items() if v is not None})

    def _cancel(self) -> None:
        if self._episode is not None:
            episode, self._episode = self._episode, None
            episode.cancel()


class SandboxEnvironment(AnswerEnvironment):
    """An episode with a sandbox and all of Turnstile's tools. Made by TurnstileEnvironments."""

    def bash(self, command: str, timeout_s: float | None = None) -> str:
        """Run a command in a new bash shell in the work folder.

        Args:
            command: The command.
            timeout_s: Seconds it may take.

        Returns:
            Its output, and its exit status.
        """
        return self._call("bash", command=command, timeout_s=timeout_s)

    def read_file(self, path: str, offset: int | None = None, limit: int | None = None) -> str:
        """Read a text file.

        Args:
            path: The file; relative paths start in the work folder.
            offset: The first line to read, counted from 1.
            limit: How many lines to read.

        Returns:
            The lines with their numbers.
        """
        return self._call("read_file", path=path, offset=offset, limit=limit)

    def write_file(self, path: str, content: str) -> str:
        """Make or replace a file.

        Args:
            path: The file; relative paths start in the work folder.
            content: All of its text.

        Returns:
            How much was written.
        """
        return self._call("write_file", path=path, content=content)

    def edit_file(self, path: str, old: str, new: str, replace_all: bool = False) -> str:
        """Replace text in a file. The old text must occur exactly once, or every occurrence is to be replaced.

        Args:
            path: The file; relative paths start in the work folder.
            old: The text to replace, exactly as it is there.
            new: The text to put in its place.
            replace_all: Whether to replace every occurrence.

        Returns:
            How often it was replaced.
        """
        return self._call("edit_file", path=path, old=old, new=new, replace_all=replace_all)


class TurnstileEnvironments:
    """The ``environment_factory``: makes environments, and cancels what they left open when its block ends.

        with TurnstileEnvironments(servers) as environments:
            GRPOTrainer(…, train_dataset=task_dataset(tasks), environment_factory=environments).train()

    ``sandbox``: False offers ``submit`` alone. ``limits`` and ``metadata``: of every episode; an episode without
    model calls is ended by ``idle_s``, so give it the time that TRL takes for a whole batch. ``start_s``: how long
    ``reset`` waits for an episode to run. ``call_s``: how long a tool call may take.
    """

    def __init__(
        self,
        servers: TurnstileServers,
        *,
        sandbox: bool = True,
        limits: Limits | Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        start_s: float = 300.0,
        call_s: float = 600.0,
    ) -> None:
        self._servers = servers
        self._kind = SandboxEnvironment if sandbox else AnswerEnvironment
        self._limits = limits
        self._metadata = metadata
        self._start_s = start_s
        self._client: Client = servers.client()
        timeout = httpx.Timeout(call_s, connect=servers.settings.connect_s)
        self._http = httpx.Client(**client_arguments(servers.settings), timeout=timeout)
        self._made: list[AnswerEnvironment] = []

    def __call__(self) -> AnswerEnvironment:
        made = self._kind(self)
        self._made.append(made)
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the open episodes and closes the connections. Raises the client's errors."""
        with contextlib.ExitStack() as stack:  # an error of one of them does not keep the others from closing
            stack.callback(self._client.close)
            stack.callback(self._http.close)
            for environment in self._made:
                stack.callback(environment._cancel)

    def _begin(self, task: Any) -> NewEpisodeHandle:
        episode = self._client.create_episode(task, limits=self._limits, metadata=self._metadata)
        deadline = time.monotonic() + self._start_s
        with episode:
            while (found := episode.status()).status is not EpisodeStatus.RUNNING:
                if found.status.ended:
                    why = found.error.message if found.error is not None else str(found.status)
                    raise errors.TurnstileError(f"{episode.episode_id} ended before it began: {why}")
                if time.monotonic() > deadline:
                    raise errors.Timeout(
                        f"{episode.episode_id} is {found.status} after {self._start_s:g} s. TRL begins a whole "
                        "batch before it plays an episode: the server's episodes.max_running must be as large"
                    )
                time.sleep(_LOOK_S)
        return episode

    def _call(self, episode: NewEpisodeHandle, tool: str, arguments: dict[str, Any]) -> str:
        """The tool's text. Raises ToolFailed for an error of the tool or a refusal of the MCP endpoint."""
        if episode.tool_url is None:
            raise ToolFailed("this episode has no tools")
        headers = {
            "authorization": f"Bearer {episode.episode_key}",
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": _MCP,
            "mcp-method": "tools/call",
            "mcp-name": tool,
        }
        params = {"name": tool, "arguments": arguments, "_meta": _META}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        try:
            answer = self._http.post(episode.tool_url, json=body, headers=headers)
            said = _message(answer)
        except (httpx.HTTPError, ValueError) as error:
            raise ToolFailed(f"the MCP endpoint did not answer: {error or type(error).__name__}") from error
        if "error" in said:
            raise ToolFailed(said["error"]["message"])
        result = said["result"]
        text = "\n".join(part["text"] for part in result["content"] if part["type"] == "text")
        if result.get("isError"):
            raise ToolFailed(text)
        return text


def _message(answer: httpx.Response) -> dict[str, Any]:
    """The JSON-RPC answer: the body, or the last event of it. Raises ValueError where there is none."""
    text = answer.text
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line.removeprefix("data:") for line in text.splitlines() if line.startswith("data:")]
        text = events[-1] if events else ""
    said = json.loads(text)
    if not isinstance(said, dict) or not ({"error", "result"} & said.keys()):
        raise ValueError(f"HTTP {answer.status_code}, and no JSON-RPC answer")
    return said
