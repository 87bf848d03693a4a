"""One task folder of Harbor to a task: everything that is wrong with it, or cannot be played, is found at once.

What must hold: the folder may come from anywhere, so nothing is read through a link that it holds; else it could
put other files of this machine into an instruction or an image.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from turnstile.models import Limits
from turnstile_server.sandboxes.protocol import IMAGE_WORKDIR
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.harbor.config import HarborConfig
from turnstile_server.tasks.harbor.findings import FolderFindings
from turnstile_server.tasks.harbor.image import COMPOSE_FILES, HarborImage, find_image
from turnstile_server.tasks.harbor.network import network_of
from turnstile_server.tasks.harbor.refusals import refuse_unsupported
from turnstile_server.tasks.harbor.test_text import needs_more
from turnstile_server.tasks.harbor.toml_lines import key_lines
from turnstile_server.tasks.image_build import ContextProblem
from turnstile_server.tasks.model import Gold, SandboxWish, Task
from turnstile_server.tasks.network import NetworkWish
from turnstile_server.tasks.parse import Loc
from turnstile_server.tasks.rehearsal import rehearsed
from turnstile_server.tasks.script import GoldScript, ScriptTests
from turnstile_server.tasks.tarball import FilesProblem, check_folder, read_files

CONFIG = "task.toml"
INSTRUCTION = "instruction.md"
_TEXTS = (CONFIG, INSTRUCTION, *(f"environment/{name}" for name in COMPOSE_FILES))
_FOLDERS = ("environment", "tests", "solution")
_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
_NO_SCRIPT = "there is no such script; it judges the work"
_DIFFICULTIES = ("easy", "medium", "hard")


class TaskFolder:
    """Reads one. ``environment``: the variables that templates may take, of the server's own."""

    def __init__(self, path: Path, settings: TaskSettings, environment: Mapping[str, str] = os.environ) -> None:
        self._path = path
        self._settings = settings
        self._environment = environment
        self.found = FolderFindings(path)
        self._network = NetworkWish()
        self._steps = False
        """The file has [[steps]], whatever else is wrong with it."""
        self.asks_for_network = False
        """The file says so; it is Harbor's default, too."""

    def read(self) -> Task | None:
        """The task; None where ``found`` has a problem or something unsupported."""
        if self._leads_out():
            return None
        config = self._config()
        instruction = None if self._steps else self._instruction()
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
        self._network = network_of(config, self._settings, self.found)
        tests = self._tests(config, instruction, image)
        gold = self._gold(config)
        environment = {**image.environment, **self._filled(config.environment.env, ("environment", "env"))}
        if self.found.problems or self.found.unsupported or instruction is None or tests is None:
            return None
        return self._task(config, instruction, image, tests, gold, environment)

    def _leads_out(self) -> bool:
        """Whether a part is no plain file or folder, or too large to be read."""
        most = self._settings.max_source_bytes
        for name in (*_TEXTS, *_FOLDERS):
            part = self._path / name
            try:
                status = part.lstat()
            except OSError:
                continue  # missing: told where it is needed
            if stat.S_ISLNK(status.st_mode):
                self.found.wrong("it is a link; put what it leads to into the folder", file=part)
            elif name in _TEXTS and not stat.S_ISREG(status.st_mode):
                self.found.wrong("it is no regular file", file=part)
            elif name in _TEXTS and status.st_size > most:
                self.found.wrong(f"larger than {most} bytes (tasks.max_source_bytes)", file=part)
        return bool(self.found.problems)

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
        self._steps = bool(values.get("steps"))
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
            self.found.wrong(item["msg"].removeprefix("Value error, "), loc)

    def _missing(self) -> None:
        """Files that are not there, where ``task.toml`` cannot say more."""
        script = self._path / "tests" / "test.sh"
        if not self._steps and not script.is_file():
            self.found.wrong(_NO_SCRIPT, file=script)

    def _instruction(self) -> str | None:
        file = self._path / INSTRUCTION
        for name, why in (
            ("trajectory.json", "a conversation that the agent is to go on with"),
            (".harborignore", "files that Harbor leaves out of tests and solution"),
        ):
            if (self._path / name).exists():
                self.found.refuse(f"{why} ({name}) cannot be given here", file=self._path / name)
        try:
            text = _without_canary(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            self.found.wrong(f"not UTF-8: {error.reason} at byte {error.start}", file=file)
            return None
        except OSError as error:
            self.found.wrong(error.strerror or str(error), file=file)
            return None
        if not text.strip():
            self.found.wrong("the instruction is empty", file=file)
            return None
        return text

    def _tests(self, config: HarborConfig, instruction: str | None, image: HarborImage) -> ScriptTests | None:
        if config.steps:
            return None
        folder = self._path / "tests"
        if not (folder / "test.sh").is_file():
            self.found.wrong(_NO_SCRIPT, file=folder / "test.sh")
            return None
        files = self._files(folder)
        if files is None:
            return None
        env = self._filled(config.verifier.env, ("verifier", "env"))
        script = ScriptTests(files=files, env=env, timeout_s=config.verifier.timeout_sec)
        if not self._settings.inspect_scripts:
            return script
        texts = {name: data.decode(errors="replace") for name, data in read_files(files, self._settings).items()}
        online = bool(self._network.tests)
        needed = needs_more(texts, instruction or "", image.workdir, online=online)
        rehearse = self._settings.rehearse_tests and any(each.fetches for each in needed)
        for each in needed:
            if not (rehearse and each.fetches):
                self.found.refuse(each.why, file=folder / each.file, line=each.line)
        return self._rehearsed(script, folder, config, image) if rehearse else script

    def _rehearsed(
        self, script: ScriptTests, folder: Path, config: HarborConfig, image: HarborImage
    ) -> ScriptTests | None:
        if image.name is None:  # which is told
            return None
        build_s, most = config.environment.build_timeout_sec, self._settings.max_context_bytes
        try:
            return rehearsed(script, folder, image.name, image.place, build_s, most)
        except ContextProblem as error:
            self.found.wrong(str(error), file=folder)
            return None

    def _gold(self, config: HarborConfig) -> Gold | None:
        env = self._filled(config.solution.env, ("solution", "env"))
        folder = self._path / "solution"
        if config.steps or not folder.is_dir():
            return None
        if not (folder / "solve.sh").is_file():
            self.found.wrong("the folder has no solve.sh", file=folder)
            return None
        files = self._files(folder)
        if files is None:
            return None
        env = {"DEBIAN_FRONTEND": "noninteractive", **env}
        timeout_s = config.agent.timeout_sec or self._settings.solution_timeout_s
        return Gold(script=GoldScript(files=files, env=env, timeout_s=timeout_s))

    def _files(self, folder: Path) -> Files | None:
        try:
            check_folder(folder, self._settings)
        except FilesProblem as error:
            self.found.wrong(str(error), file=folder)
            return None
        return Files(folder=folder.absolute())

    def _filled(self, values: Mapping[str, str], loc: Loc) -> dict[str, str]:
        """With templates filled. A task takes none of the server's variables that the operator did not name."""
        return {name: self._fill(value, (*loc, name)) for name, value in values.items()}

    def _fill(self, value: str, loc: Loc) -> str:
        template = _TEMPLATE.fullmatch(value)
        if template is None:
            return value
        name, default = template[1], template[2]
        allowed = name in self._settings.host_env
        if allowed and name in self._environment:
            return self._environment[name]
        if default is not None:
            return default
        why = "the server has no such variable" if allowed else "tasks.host_env does not name it"
        self.found.wrong(f"{value} cannot be filled in: {why}", loc)
        return ""

    def _task(
        self,
        config: HarborConfig,
        instruction: str,
        image: HarborImage,
        tests: ScriptTests,
        gold: Gold | None,
        environment: Mapping[str, str],
    ) -> Task | None:
        wish = config.environment
        metadata = _plain(config.metadata)
        difficulty, tags = metadata.get("difficulty"), metadata.get("tags") or ()
        values = {
            "id": task_id(self._path.absolute().name),
            "instruction": instruction,
            "image": image.name,
            "build": image.build,
            "workdir": image.place or IMAGE_WORKDIR,
            "image_files": True,
            "env": environment,
            "network": self._network,
            "script": tests,
            "gold": gold,
            "limits": Limits(wall_s=config.agent.timeout_sec),
            "sandbox": SandboxWish(memory_mb=wish.memory_mib, cpus=wish.cpus),
            "difficulty": difficulty if difficulty in _DIFFICULTIES else None,
            "tags": tuple(map(str, tags if isinstance(tags, list | tuple) else (tags,))),
            "metadata": {"harbor": _told(config, metadata)},
        }
        try:
            return Task.model_validate(values)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                loc = tuple(part for part in item["loc"] if part != "[key]")
                self.found.wrong(item["msg"].removeprefix("Value error, "), loc, file=self._path)
            return None


def task_id(folder_name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", folder_name)[:64]


def _told(config: HarborConfig, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a trainer may want to know, and what Turnstile does not do as Harbor would."""
    told: dict[str, Any] = {
        "name": config.task.name if config.task is not None else None,
        "network": config.environment.network,
        "agent_user": config.agent.user,
        "verifier_user": config.verifier.user,
        "storage_mb": config.environment.storage_mib,
        "metadata": metadata,
    }
    return {name: value for name, value in told.items() if value not in (None, {}, [])}


def _without_canary(text: str) -> str:
    """Harbor takes marks that keep a text out of training data off the head of an instruction."""
    lines = text.split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
        start += 1
    return "\n".join(lines[start:]).lstrip("\n") if start else text


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
