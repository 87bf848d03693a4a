"""One task folder of Harbor to a task: everything that is wrong with it, or cannot be played, is found at once."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from turnstile.models import Limits
from turnstile.models.faults import fault_text
from turnstile_server.kinds.harbor.config import HarborConfig, HarborVerifier
from turnstile_server.kinds.harbor.findings import FolderFindings
from turnstile_server.kinds.harbor.folder_parts import INSTRUCTION, SOLUTION, TESTS, FolderParts
from turnstile_server.kinds.harbor.image import COMPOSE_FILES, HarborImage, find_image
from turnstile_server.kinds.harbor.network import network_of
from turnstile_server.kinds.harbor.refusals import refuse_unsupported
from turnstile_server.kinds.harbor.steps import STEPS, StepFolders
from turnstile_server.kinds.harbor.toml_lines import key_lines
from turnstile_server.sandboxes.protocol import IMAGE_WORKDIR
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.image_build import ContextProblem
from turnstile_server.tasks.model import Gold, SandboxWish, Task
from turnstile_server.tasks.parse import Loc
from turnstile_server.tasks.rehearsal import rehearsed
from turnstile_server.tasks.script import ScriptTests

CONFIG = "task.toml"
_TEXTS = (CONFIG, INSTRUCTION, *(f"environment/{name}" for name in COMPOSE_FILES))
_FOLDERS = ("environment", TESTS, SOLUTION, STEPS)
_DIFFICULTIES = ("easy", "medium", "hard")


class TaskFolder:
    """Reads one. ``environment``: the variables that templates may take, of the server's own."""

    def __init__(self, path: Path, settings: TaskSettings, environment: Mapping[str, str] = os.environ) -> None:
        self._path = path
        self._settings = settings
        self.found = FolderFindings(path)
        self._parts = FolderParts(path, settings, environment, self.found)
        self._has_steps = False
        """The file has [[steps]], whatever else is wrong with it."""
        self.asks_for_network = False
        """The file says so; it is Harbor's default, too."""

    def read(self) -> Task | None:
        """The task; None where ``found`` has a problem or something unsupported."""
        if self._parts.leads_out(texts=_TEXTS, folders=_FOLDERS):
            return None
        config = self._config()
        instruction = None if self._has_steps else self._parts.instruction(self._path)
        if config is None:
            self._missing()
            return None
        wish = config.environment
        self.asks_for_network = (
            not self._settings.public_network
            and wish.network == "public"
            and {"network_mode", "allow_internet"} & wish.model_fields_set != set()
        )
        image = find_image(self._path, config, self._settings, self.found)
        refuse_unsupported(config, image.workdir, self.found)
        network = network_of(config, self._settings, self.found)
        played = self._played(config, instruction, image, online=bool(network.tests))
        environment = {**image.environment, **self._parts.filled(wish.env, ("environment", "env"))}
        if self.found.problems or self.found.unsupported or played is None:
            return None
        return self._task(config, image, {**played, "env": environment, "network": network})

    def _played(
        self, config: HarborConfig, instruction: str | None, image: HarborImage, *, online: bool
    ) -> dict[str, Any] | None:
        """The fields that say what is asked and how it is judged; None where something is missing."""
        tests_env = self._parts.filled(config.verifier.env, ("verifier", "env"))
        solution_env = self._parts.filled(config.solution.env, ("solution", "env"))
        wall_s = config.agent.timeout_sec
        if config.steps:
            steps = StepFolders(
                self._path,
                config,
                self._parts,
                self.found,
                tests_env=tests_env,
                solution_env=solution_env,
                workdir=image.workdir,
                online=online,
            ).read()
            if len(steps) < len(config.steps):
                return None
            times = [step.timeout_s for step in steps if step.timeout_s is not None]
            golds = [step.gold for step in steps if step.gold is not None]
            return {
                "instruction": steps[0].instruction,
                "script": steps[0].script,
                "gold": Gold(script=golds[0]) if len(golds) == len(steps) else None,
                "steps": steps,
                "step_reward": config.multi_step_reward_strategy or "mean",
                "limits": Limits(wall_s=sum(times) if len(times) == len(steps) else None),
            }
        tests = self._parts.tests([self._path / TESTS], tests_env, config.verifier.timeout_sec)
        gold = self._parts.solution(self._path / SOLUTION, solution_env, wall_s)
        if tests is None:
            return None
        rehearse = self._settings.rehearse_tests
        asked = instruction or ""
        if self._parts.refuse_needs(tests, asked, image.workdir, online=online, rehearse=rehearse):
            tests = self._rehearsed(tests, config, image)
        return {
            "instruction": instruction,
            "script": tests,
            "gold": None if gold is None else Gold(script=gold),
            "limits": Limits(wall_s=wall_s),
        }

    def _rehearsed(self, tests: ScriptTests, config: HarborConfig, image: HarborImage) -> ScriptTests:
        if image.name is None:  # which is told
            return tests
        build_s, most = config.environment.build_timeout_sec, self._settings.max_context_bytes
        folder = self._path / TESTS
        try:
            return rehearsed(tests, folder, image.name, image.place, build_s, most)
        except (ContextProblem, OSError) as error:
            self.found.wrong(str(error), file=folder)
            return tests

    def _config(self) -> HarborConfig | None:
        file = self._path / CONFIG
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            self.found.wrong(f"not UTF-8: {error.reason} at byte {error.start}")
            return None
        except OSError as error:
            self.found.wrong(error.strerror or str(error))
            return None
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            at = re.search(r"at line (\d+)", str(error))
            self.found.wrong(f"not TOML: {error}", line=int(at[1]) if at else None)
            return None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, or nested too deep
            self.found.wrong(f"not TOML that can be read: {error}")
            return None
        self.found.lines = key_lines(text)
        self._has_steps = bool(values.get("steps"))
        try:
            return HarborConfig.model_validate(values)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                self._wrong_key(item)
            self.found.problems.sort(key=lambda each: each.line or 0)
            return None

    def _wrong_key(self, item: Mapping[str, Any]) -> None:
        loc: Loc = tuple(part for part in item["loc"] if part not in ("[key]", "str", "HarborArtifact"))
        if item["type"] == "extra_forbidden":
            self.found.wrong(
                "Harbor has no such key, so it would do nothing; mend the name, or put it under [metadata]", loc
            )
        else:
            self.found.wrong(fault_text(item), loc)

    def _missing(self) -> None:
        """Files that are not there, where ``task.toml`` cannot say more."""
        if not self._has_steps:
            self._parts.tests([self._path / TESTS], {}, HarborVerifier().timeout_sec)

    def _task(self, config: HarborConfig, image: HarborImage, fields: Mapping[str, Any]) -> Task | None:
        wish = config.environment
        metadata = _plain(config.metadata)
        difficulty, tags = metadata.get("difficulty"), metadata.get("tags") or ()
        values = {
            "id": task_id(self._path.absolute().name),
            "image": image.name,
            "build": image.build,
            "workdir": image.place or IMAGE_WORKDIR,
            "image_files": True,
            "sandbox": SandboxWish(memory_mb=wish.memory_mib, cpus=wish.cpus),
            "difficulty": difficulty if difficulty in _DIFFICULTIES else None,
            "tags": tuple(map(str, tags if isinstance(tags, list | tuple) else (tags,))),
            "metadata": {"harbor": _told(config, metadata)},
            **fields,
        }
        try:
            return Task.model_validate(values)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                loc = tuple(part for part in item["loc"] if part != "[key]")
                self.found.wrong(fault_text(item), loc, file=self._path)
            return None


def task_id(folder_name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", folder_name)[:64]


def _told(config: HarborConfig, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that a trainer may want to know, and settings that Turnstile does not apply as Harbor would."""
    told: dict[str, Any] = {
        "name": config.task.name if config.task is not None else None,
        "network": config.environment.network,
        "agent_user": config.agent.user,
        "verifier_user": config.verifier.user,
        "storage_mb": config.environment.storage_mib,
        "steps": [step.name for step in config.steps],
        "metadata": metadata,
    }
    return {name: value for name, value in told.items() if value not in (None, {}, [])}


def _plain(value: Any) -> Any:
    """As JSON can hold it: TOML has dates."""
    match value:
        case dict():
            return {str(name): _plain(each) for name, each in value.items()}
        case list():
            return [_plain(each) for each in value]
        case None | bool() | int() | float() | str():
            return value
        case _:
            return str(value)
