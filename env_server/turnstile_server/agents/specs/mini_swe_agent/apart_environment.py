"""mini-swe-agent's environment whose commands run as another user, who cannot read the key of the episode.

``ApartEnvironment`` is ``LocalEnvironment`` but for the process that runs the commands. It is launched as the
sandbox's user ``agent`` (``turnstile_launch``, by the launcher that this process inherited) and is sent one
command at a time (``command_runner``). The commands may kill it, or speak in its place: that spoils the
results of those commands alone, and the next one gets a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, BinaryIO

import turnstile_launch
from minisweagent.environments.local import LocalEnvironment

_RUNNER = Path(__file__).with_name("command_runner.py")
_PRIVATE = re.compile(r"HOME|OPENAI_API_KEY|TURNSTILE_LAUNCHER|(MSWEA|LITELLM)_.*")
"""Variables of this process that are not for commands. Their HOME is that of their own user."""
_MAX_RESULT = 8 << 20
"""Bytes of one result's line: six for each byte of an output, as JSON may need, and the rest."""


class RunnerDied(Exception):
    """The process that runs the commands has ended, or sends what is no result."""

    def __init__(self) -> None:
        super().__init__("the process that runs the commands was killed; the next command gets a new one")


class _Runner:
    """The launched process, and both ends of what is said to it."""

    def __init__(self) -> None:
        their_in, our_in = os.pipe()
        our_out, their_out = os.pipe()
        try:
            argv = [sys.executable, "-IB", str(_RUNNER)]
            self._launched = turnstile_launch.launch(argv, stdio=(their_in, their_out, 2))
        except turnstile_launch.CannotLaunch:
            os.close(our_in)
            os.close(our_out)
            raise
        finally:
            os.close(their_in)
            os.close(their_out)
        self._asked = 0
        self._requests: BinaryIO = os.fdopen(our_in, "wb", buffering=0)
        self._results: BinaryIO = os.fdopen(our_out, "rb")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises RunnerDied, also where a command spoke in the runner's place: a line too many would put every
        later result out of step."""
        self._asked += 1
        try:
            self._requests.write(json.dumps({"id": self._asked, **request}).encode() + b"\n")
            line = self._results.readline(_MAX_RESULT)
            result = json.loads(line)
        except (OSError, ValueError, RecursionError) as error:
            raise RunnerDied from error
        if not (isinstance(result, dict) and isinstance(result.get("output"), str)):
            raise RunnerDied
        if not isinstance(result.get("returncode"), int) or result.get("id") != self._asked:
            raise RunnerDied
        return result

    def close(self) -> None:
        self._launched.kill()
        self._requests.close()
        self._results.close()
        with contextlib.suppress(turnstile_launch.CannotLaunch):  # no process could be made: so none is left
            self._launched.wait()


class ApartEnvironment(LocalEnvironment):  # type: ignore[misc]  # mini-swe-agent is not installed here
    """Runs commands as the user ``agent``. Raises ``turnstile_launch.CannotLaunch`` where that is impossible."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._runner: _Runner | None = _Runner()

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """As ``LocalEnvironment.execute``, with the same keys and texts."""
        shown = {name: value for name, value in os.environ.items() if not _PRIVATE.fullmatch(name)}
        request = {
            "command": action.get("command", ""),
            "cwd": cwd or self.config.cwd or os.getcwd(),
            "env": {**shown, **self.config.env},
            "timeout_s": timeout or self.config.timeout,
        }
        output = _shown(self._ask(request))
        self._check_finished(output)
        return output

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if self._runner is None:
                self._runner = _Runner()
            return self._runner.ask(request)
        except (RunnerDied, turnstile_launch.CannotLaunch) as error:
            runner, self._runner = self._runner, None
            if runner is not None:
                runner.close()
            return {"output": "", "returncode": -1, "error": str(error), "error_type": type(error).__name__}


def _shown(result: dict[str, Any]) -> dict[str, Any]:
    """A result in the keys of ``LocalEnvironment``."""
    output = {"output": result["output"], "returncode": result["returncode"], "exception_info": ""}
    if "error" in result:
        error = str(result["error"])
        output["exception_info"] = f"An error occurred while executing the command: {error}"
        output["extra"] = {"exception_type": str(result.get("error_type")), "exception": error}
    return output
