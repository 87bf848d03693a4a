"""The parts of a task folder, and of each of its steps: an instruction, tests, a solution, with variables.

What must hold: the folder may come from anywhere, so nothing is read through a link that it holds; else it could
put other files of this machine into an instruction or an image.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from turnstile_server.kinds.harbor.findings import FolderFindings
from turnstile_server.kinds.harbor.test_text import needs_more
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.parse import Loc
from turnstile_server.tasks.script import GoldScript, ScriptTests
from turnstile_server.tasks.tarball import FilesProblem, check_folder, read_files

INSTRUCTION, TESTS, SOLUTION = "instruction.md", "tests", "solution"
TEST_SCRIPT, SOLVE_SCRIPT = "test.sh", "solve.sh"
_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
_NO_SCRIPT = "there is no such script; it judges the work"


class FolderParts:
    """Reads them. ``environment``: the variables that templates may take, of the server's own. What is wrong goes
    to ``found``."""

    def __init__(
        self, path: Path, settings: TaskSettings, environment: Mapping[str, str], found: FolderFindings
    ) -> None:
        self._path = path
        self._settings = settings
        self._environment = environment
        self._found = found

    def leads_out(self, *, texts: Sequence[str], folders: Sequence[str]) -> bool:
        """True if a part is no plain file or folder, or too large to be read."""
        before, most = len(self._found.problems), self._settings.max_source_bytes
        for name in (*texts, *folders):
            part = self._path / name
            try:
                status = part.lstat()
            except OSError:
                continue  # missing: told where it is needed
            if stat.S_ISLNK(status.st_mode):
                self._found.wrong("it is a link; put what it leads to into the folder", file=part)
            elif name in texts and not stat.S_ISREG(status.st_mode):
                self._found.wrong("it is no regular file", file=part)
            elif name in texts and status.st_size > most:
                self._found.wrong(f"larger than {most} bytes (tasks.max_source_bytes)", file=part)
        return len(self._found.problems) > before

    def instruction(self, place: Path) -> str | None:
        """That of the folder ``place``; None where there is none."""
        file = place / INSTRUCTION
        for folder, name, why in (
            (place, "trajectory.json", "a conversation that the agent is to go on with"),
            (self._path, ".harborignore", "files that Harbor leaves out of tests and solution"),
        ):
            if (folder / name).exists():
                self._found.refuse(f"{why} ({name}) cannot be given here", file=folder / name)
        try:
            text = _without_canary(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            self._found.wrong(f"not UTF-8: {error.reason} at byte {error.start}", file=file)
            return None
        except OSError as error:
            self._found.wrong(error.strerror or str(error), file=file)
            return None
        if not text.strip():
            self._found.wrong("the instruction is empty", file=file)
            return None
        return text

    def tests(self, folders: Sequence[Path], env: Mapping[str, str], timeout_s: float) -> ScriptTests | None:
        """Those of ``folders``, each over the ones before."""
        if not any((folder / TEST_SCRIPT).is_file() for folder in folders):
            self._found.wrong(_NO_SCRIPT, file=folders[-1] / TEST_SCRIPT)
            return None
        files = self.files([folder for folder in folders if folder.is_dir()])
        return None if files is None else ScriptTests(files=files, env=env, timeout_s=timeout_s)

    def refuse_needs(
        self, tests: ScriptTests, asked: str, workdir: str | None, *, online: bool, rehearse: bool = False
    ) -> bool:
        """Refuse tests whose text needs something that no copy of the work folder has. ``asked``: texts that say
        which paths the work is at; ``online``: tests may reach hosts. Returns True if the tests fetch something
        and ``rehearse`` lets them. Without ``rehearse`` that is refused, too."""
        if not self._settings.inspect_scripts:
            return False
        files = read_files(tests.files, self._settings)
        texts = {name: data.decode(errors="replace") for name, data in files.items()}
        fetches = False
        for each in needs_more(texts, asked, workdir, online=online):
            if rehearse and each.fetches:
                fetches = True
                continue
            folder = next(one for one in reversed(tests.files.folders) if (one / each.file).is_file())
            self._found.refuse(each.why, file=folder / each.file, line=each.line)
        return fetches

    def solution(self, folder: Path, env: Mapping[str, str], timeout_s: float | None) -> GoldScript | None:
        """None where there is none."""
        if not folder.is_dir():
            return None
        if not (folder / SOLVE_SCRIPT).is_file():
            self._found.wrong("the folder has no solve.sh", file=folder)
            return None
        files = self.files([folder])
        if files is None:
            return None
        env = {"DEBIAN_FRONTEND": "noninteractive", **env}
        return GoldScript(files=files, env=env, timeout_s=timeout_s or self._settings.solution_timeout_s)

    def files(self, folders: Sequence[Path]) -> Files | None:
        """Those of ``folders``, each over the ones before; None where one cannot be used, or there is none."""
        for folder in folders:
            try:
                check_folder(folder, self._settings)
            except FilesProblem as error:
                self._found.wrong(str(error), file=folder)
                return None
        return Files.layered([folder.absolute() for folder in folders])

    def filled(self, values: Mapping[str, str], loc: Loc) -> dict[str, str]:
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
        self._found.wrong(f"{value} cannot be filled in: {why}", loc)
        return ""


def _without_canary(text: str) -> str:
    """Harbor takes marks that keep a text out of training data off the head of an instruction."""
    lines = text.split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
        start += 1
    return "\n".join(lines[start:]).lstrip("\n") if start else text
