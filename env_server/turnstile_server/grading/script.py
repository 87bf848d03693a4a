"""Grades by a script that writes its reward into a file, as Harbor's, in a copy of the task (``judged_copy``).

No process of the agent ever ran where the script does, and none of its files but the diff of the work folder is
there. What the script runs of the work it runs with its own rights (``trust: in_process``).

What must hold: the reward file is new, has a name that stands in the tests (where one does), is read when no
process is left, and through no link. Where it is no number the same script judges the untouched task: the work
scores 0 if that has a reward, so that none hangs, kills or spoils its way out of a group; else there is none, by
the task's fault.
"""

from __future__ import annotations

import json

import anyio.to_thread

from turnstile_server.errors import FileProblem, TaskFailed
from turnstile_server.grading.bounds import GradingBounds
from turnstile_server.grading.errors import GraderFailed
from turnstile_server.grading.judged_copy import JudgedCopies
from turnstile_server.grading.programs import PROGRAMS, python_of
from turnstile_server.grading.protocol import Component, ComponentGrader, GradingTools, Work
from turnstile_server.grading.script_reward import REWARD_FILES, NoReward, ScriptReward, read_reward
from turnstile_server.grading.verdict import CANNOT_RUN, MAX_TEXT, DiffVerdict, printable, storable
from turnstile_server.sandboxes.protocol import Command, ExecResult, Sandbox, User
from turnstile_server.settings import GradingSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.script import ScriptTests
from turnstile_server.tasks.workspace import run_script


class ScriptFailed(GraderFailed):
    """A script that judges a work left no usable reward: no file, or no number in it."""

    type = "no_reward"


TESTS = "/tests"
REWARDS = "/logs/verifier"
_READER = f"{PROGRAMS}/inside/read_reward.py"


class ScriptGrader(ComponentGrader):
    """The component ``script``: the number that the task's script wrote."""

    Options = ScriptTests

    def __init__(self, tools: GradingTools, name: str, options: ScriptTests) -> None:
        self._copies = JudgedCopies(tools)
        self._settings = tools.settings

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        assert task.script is not None  # else the task does not ask for this component
        if task.script.timeout_s >= self._settings.timeout_s:
            raise TaskFailed(
                f"The script of task {task.id} may take {task.script.timeout_s:g} s, and a whole grading has "
                f"{self._settings.timeout_s:g} s (grading.timeout_s), which must be longer."
            )
        return await self._copies.judged(task, work, _ScriptJudge(task, task.script, self._copies, self._settings))


class _ScriptJudge:
    """A ``CopyJudge``."""

    component = "script"
    protected = ()

    def __init__(self, task: Task, script: ScriptTests, copies: JudgedCopies, settings: GradingSettings) -> None:
        self._task = task
        self._script = script
        self._copies = copies
        self._bounds = settings.bounds_of(GradingBounds)
        self.elsewhere = False

    async def prepare(self, sandbox: Sandbox) -> None:
        self.elsewhere = False  # of the attempt before
        probe = await sandbox.exec(
            Command(
                ("bash", "-c", "exit 0"),
                user=User.TESTS,
                timeout_s=self._bounds.probe_timeout_s,
            )
        )
        if probe.exit_code in CANNOT_RUN:
            raise TaskFailed(f"The image of task {self._task.id} has no bash, by which its script is run.")

    async def judge(self, sandbox: Sandbox, diff: DiffVerdict) -> Component:
        detail: dict[str, object] = {"trust": "in_process"}
        try:
            reward = await self._run(sandbox, detail)
        except NoReward as error:
            return await self._without_reward(str(error), detail, diff)
        summary = () if reward.value == 1.0 else (f"script: it gave {reward.value:g}",)
        return Component(reward.value, self._found(diff, detail), diff.summary + summary)

    async def _without_reward(self, why: str, detail: dict[str, object], diff: DiffVerdict) -> Component:
        """Whose doing it is, as the untouched task shows. Raises ScriptFailed: the task's."""
        self.elsewhere = True

        async def judge(clean: Sandbox) -> None:
            await self._run(clean, {})

        try:
            await self._copies.judge_untouched(self._task, judge)
        except NoReward as error:
            raise self._none(why, str(error), detail) from None
        note = f"it gave no reward: {why}; of the untouched task it gives one"
        return Component(
            0.0, self._found(diff, {**detail, "note": note}), (*diff.summary, f"script: {note}"), spoiled=True
        )

    def _found(self, diff: DiffVerdict, detail: dict[str, object]) -> dict[str, object]:
        return {"diff": dict(diff.detail), self.component: storable(detail)}

    async def _run(self, sandbox: Sandbox, detail: dict[str, object]) -> ScriptReward:
        """Fills ``detail``. Raises NoReward."""
        script = self._script
        archive = await anyio.to_thread.run_sync(self._copies.pack, script.files)
        try:
            await sandbox.upload(archive, TESTS, user=User.TESTS)
        except FileProblem as error:
            raise NoReward(f"its tests cannot be unpacked: {error.message}") from None
        result = await run_script(sandbox, TESTS, script.program, script.env, script.timeout_s, User.TESTS)
        await sandbox.stop_all()  # nobody writes while the reward is read
        detail |= {
            "exit_code": result.exit_code,
            "output": (result.stdout + result.stderr)[-MAX_TEXT:].decode(errors="replace").strip(),
        }
        if result.timed_out:
            raise NoReward(f"it ran longer than {script.timeout_s:g} s")
        found = await self._files(sandbox)
        # A file that no test names was written by the work, which runs with the script's rights.
        named = [name for name in REWARD_FILES if name.encode() in archive] or REWARD_FILES
        files = {name: each for name, each in found.items() if name in named}
        reward = read_reward(files, script.reward_key)
        detail |= {"file": reward.file, "rewards": dict(reward.rewards)}
        if ignored := sorted(found.keys() - {reward.file}):
            detail["ignored"] = ignored
        return reward

    async def _files(self, sandbox: Sandbox) -> dict[str, dict[str, str]]:
        config = {
            "folder": REWARDS,
            "names": REWARD_FILES,
            "max_bytes": self._bounds.max_reward_bytes,
        }
        room = 8 * self._bounds.max_reward_bytes  # a byte may take six in JSON
        command = Command(
            (*python_of(sandbox), _READER),
            cwd="/",
            user=User.TESTS,
            stdin=json.dumps(config).encode(),
            timeout_s=self._bounds.probe_timeout_s,
            max_output_bytes=2 * room,
        )
        return _read(await sandbox.exec(command))

    def _none(self, why: str, untouched: str, detail: dict[str, object]) -> ScriptFailed:
        lines = str(detail.get("output", "")).splitlines()
        ended = f". It ended with {detail['exit_code']}" if "exit_code" in detail else ""
        last = f"{ended}; the last that it said: {printable(lines[-1])}" if lines else ended
        return ScriptFailed(
            f"The script of task {self._task.id} gave no reward: {why}{last}. Of the untouched task "
            f"it gives none, either: {untouched}",
            detail=storable(detail),
        )


def _read(result: ExecResult) -> dict[str, dict[str, str]]:
    """Raises NoReward."""
    try:
        found = json.loads(result.stdout)
    except ValueError:
        said = result.stderr[-MAX_TEXT:].decode(errors="replace").strip()
        raise NoReward(f"the reward file cannot be read ({result.exit_code}): {said}") from None
    assert isinstance(found, dict)
    return found
