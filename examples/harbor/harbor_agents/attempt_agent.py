"""An agent for `harbor run` that plays the attempt of a task (`attempts/TASK.sh`), where there is one.

It runs in Harbor's Python, not in Turnstile's. `ATTEMPTS` names the folder of the attempts.
"""

import os
from pathlib import Path

from harbor.agents.base import BaseAgent


class AttemptAgent(BaseAgent):
    """Runs one script in the agent's container."""

    @staticmethod
    def name() -> str:
        return "attempt"

    def version(self) -> str:
        return "1"

    async def setup(self, environment) -> None:
        """It needs nothing."""

    async def run(self, instruction, environment, context) -> None:
        script = Path(os.environ["ATTEMPTS"]) / f"{environment.environment_dir.parent.name}.sh"
        if script.is_file():
            await environment.upload_file(script, "/tmp/attempt.sh")
            await environment.exec("bash /tmp/attempt.sh")
