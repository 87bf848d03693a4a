"""A command that judges, and the programs of the work that it launches, in two sandboxes that look like one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from grading_support import Watched, grader, the_task, work

from turnstile_server.errors import TaskFailed
from turnstile_server.grading import judged_copy
from turnstile_server.grading.apart import _MOST_WAITING, _Lane
from turnstile_server.grading.protocol import Grade
from turnstile_server.tasks.model import Task

pytestmark = [pytest.mark.anyio, pytest.mark.cheats]

WORKS = {
    "say.sh": 'echo "$1"; echo error >&2; exit 3\n',
    "env.sh": 'echo "$NAME ${AS_WORK-none} $PWD"\n',
    "first.sh": "read line; echo first=$line\n",
    "echo.sh": "while read line; do echo got=$line; done\n",
    "both.sh": "for n in 1 2 3; do echo out$n; echo err$n >&2; done\n",
    "files.sh": "mkdir -p made/below; cp in.txt made/below/out.txt; rm gone.txt\n"
    "ln -s made/below latest; echo x > $1\n",
    "run.sh": "echo '#!/bin/sh' > tool; chmod 700 tool; chmod 711 tool\n",
    "serve.sh": "echo ready > log; while ! test -e ask; do sleep 0.05; done; cat ask > answer; sleep 60\n",
    "large.sh": "head -c 5000000 /dev/zero\n",
    "stop.sh": "exec sleep 60\n",
    "stdin.sh": "cat /dev/stdin\n",
    "left.sh": "sleep 60 & echo left\n",
}


def checked(**files: str) -> Task:
    """A task whose check is ``check.sh``, or ``check.py``."""
    program = ["python3", "{tests}/check.py"] if "check_py" in files else ["sh", "{tests}/check.sh"]
    inline = {name.replace("_", "."): text for name, text in files.items()}
    return the_task(
        tests={
            "runner": "command",
            "expected": [],
            "command": program,
            "files": {"inline": inline},
            "timeout_s": 60,
        }
    )


async def graded(provider: Watched, works: Mapping[str, str | tuple[str, str]], **files: str) -> Grade:
    return await grader(provider).grade(checked(**files), work(works))


CHECK = r"""
w() { name=$1; shift; "$AS_WORK" sh "$START/$name" "$@"; }
is() { test "$1" = "$2" || { echo "$3: '$1' is not '$2'"; exit 1; }; }
START=$PWD
test -f say.sh || exit 1

out=$(w say.sh hello 2> "$TMPDIR/err"); is $? 3 status
is "$out" hello output; is "$(cat "$TMPDIR/err")" error "standard error"
is "$(AS_WORK_NAME=given w env.sh)" "given none $START" environment
is "$(w both.sh 2>&1 | tr '\n' ' ')" "out1 err1 out2 err2 out3 err3 " "one stream for both"
printf '1\n2\n3\n' > "$TMPDIR/lines"
{ is "$(w first.sh)" first=1 "first of a file"; read -r second; is "$second" 2 "the rest"; } < "$TMPDIR/lines"
is "$(printf 'a\nb\n' | w echo.sh | tr '\n' ' ')" "got=a got=b " "a pipe"
is "$(w stdin.sh < "$TMPDIR/lines" | wc -l | tr -d ' ')" 3 "standard input by name"
is "$(w large.sh | wc -c | tr -d ' ')" 5000000 "much output"
is "$(w large.sh | head -c 10 | wc -c | tr -d ' ')" 10 "output that nobody reads"
is "$("$AS_WORK" no-such-program 2> /dev/null; echo $?)" 127 "no program"
is "$(w left.sh)" left "a program that leaves another"

place=$(mktemp -d) && chmod 777 "$place" && cd "$place" || exit 1
echo text > in.txt; echo old > gone.txt; mkdir sub; chmod 777 sub; echo kept > sub/kept
w files.sh sub/new; is $? 0 "status of files"
is "$(cat made/below/out.txt)" text "a file that it made"
test -e gone.txt && { echo "gone.txt is left"; exit 1; }
test -L latest && { echo "a link came over"; exit 1; }; is "$(cat latest/out.txt)" text "a file behind a link"
is "$("$AS_WORK" readlink latest)" made/below "a link, of the work's program"
is "$(cat sub/new)$(cat sub/kept)" xkept "beside another"
w run.sh; test -x tool || { echo "not executable"; exit 1; }

w serve.sh & server=$!
await() { for n in $(seq 300); do sleep 0.1; test -s "$1" && return; done; echo "no $1"; exit 1; }
await log; echo question > ask; await answer; is "$(cat answer)" question "a file that is waited for"
kill $server; wait $server
cd "$START"; rm -rf "$place"
"""

IN_PYTHON = """
import pathlib, subprocess, time
from turnstile_tests import as_work, run, shared_folder

done = run(["sh", "first.sh"], input="a\\nb\\n")
assert (done.returncode, done.stdout) == (0, "first=a\\n"), done
began = time.monotonic()
try:
    run(["sh", "stop.sh"], timeout=0.5)
except subprocess.TimeoutExpired:
    assert time.monotonic() - began < 20
else:
    raise AssertionError("it did not run out of time")
with shared_folder() as folder:
    (pathlib.Path(folder) / "in.txt").write_text("there")
    (pathlib.Path(folder) / "gone.txt").write_text("there")
    as_work(["sh", str(pathlib.Path("files.sh").absolute()), "new"], cwd=folder)
    found = sorted(path.name for path in pathlib.Path(folder).iterdir())
    assert found == ["in.txt", "latest", "made", "new"], found
"""


async def test_programs_of_the_work_run_as_if_they_were_beside_the_command(provider: Watched) -> None:
    grade = await graded(provider, WORKS, check_sh=CHECK)
    assert grade.reward == 1.0, grade.detail["tests"]["output"]
    assert provider.left == 0


async def test_so_they_do_for_a_command_in_python(provider: Watched) -> None:
    grade = await graded(provider, WORKS, check_py=IN_PYTHON)
    assert grade.reward == 1.0, grade.detail["tests"]["output"]


SUM = '"$AS_WORK" sh sum.sh {given} || exit 1\n'
ATTACKS = {
    "a link to a descriptor of what compares": (
        SUM.format(given="2 3") + 'exec 7< "${0%/*}/expected"\ncmp out.txt /dev/fd/7\n',
        "ln -sf /proc/self/fd/7 out.txt",
    ),
    "a link to standard input of what compares": (
        SUM.format(given="2 3") + 'diff - out.txt < "${0%/*}/expected"\n',
        "ln -sf /proc/self/fd/0 out.txt",
    ),
    "a link beside the script in the judge's argv": (
        SUM.format(given="2 3") + 'cmp out.txt "${0%/*}/expected"\n',
        "for f in /proc/[0-9]*/cmdline; do p=$(tr '\\0' '\\n' < $f | grep check.sh); "
        'test -n "$p" && ln -sf "${p%/*}/expected" out.txt; done 2> /dev/null',
    ),
    "a link that is made while the check waits": (
        '"$AS_WORK" sh sum.sh 2 3 & sleep 1; cmp out.txt "${0%/*}/expected"\n',
        "(while :; do ln -sf /proc/self/fd/4 out.txt; ln -sf /proc/self/fd/3 out.txt; done) & sleep 30",
    ),
    "what the check keeps to itself replaced": (
        '(umask 077; cp "${0%/*}/expected" "$TMPDIR/expected")\n'
        + SUM.format(given="2 3")
        + 'cmp out.txt "$TMPDIR/expected"\n',
        'echo 0 > out.txt; rm -f "$TMPDIR/expected"; echo 0 > "$TMPDIR/expected"; chmod 666 "$TMPDIR/expected"',
    ),
    "a link to what the check keeps to itself": (
        '(umask 077; cp "${0%/*}/expected" "$TMPDIR/expected")\n'
        + SUM.format(given="2 3")
        + 'cmp out.txt "$TMPDIR/expected"\n',
        'ln -s "$TMPDIR/expected" out.txt',
    ),
    "a link to what the check will write": (
        SUM.format(given="2 3") + 'cat "${0%/*}/expected" > answer.txt; cmp out.txt answer.txt\n',
        "ln -sf answer.txt out.txt",
    ),
    "a link to what the check writes over": (
        '"$AS_WORK" sh sum.sh 2 3 > got\ncat "${0%/*}/expected" > want; cmp got want || cmp out.txt want\n',
        "echo 0 > want; for each in got out.txt; do ln -sf want $each; done",
    ),
    "a folder that is a link": (
        SUM.format(given="2 3") + 'mkdir -p want; cat "${0%/*}/expected" > want/n; cmp have/n want/n\n',
        "ln -s want have",
    ),
    "a pipe": (
        SUM.format(given="2 3") + 'timeout 5 cmp out.txt "${0%/*}/expected"\n',
        "rm -f out.txt; mkfifo out.txt; (setsid sh -c 'cat > out.txt' < /dev/null &) 2> /dev/null",
    ),
    "a daemon that rewrites what was judged": (
        SUM.format(given="2 3") + 'sleep 1; cmp out.txt "${0%/*}/expected"\n',
        "(setsid sh -c 'while :; do ln -sf /proc/self/fd/3 out.txt; done' &) > /dev/null 2>&1",
    ),
    "all that it may killed": (SUM.format(given="2 3") + 'cmp out.txt "${0%/*}/expected"\n', "kill -9 -1"),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_no_program_of_the_work_says_what_is_read_of_it(provider: Watched, attack: str) -> None:
    check, does = ATTACKS[attack]
    start = "test -s sum.sh || exit 1\n"
    files = {"check_sh": start + check, "expected": "5\n"}
    assert (await graded(provider, {"sum.sh": f"{does}\n"}, **files)).reward == 0.0
    honest = "mkdir -p have; echo $(($1 + $2)) | tee have/n > out.txt; cat out.txt\n"
    grade = await graded(provider, {"sum.sh": honest}, **files)
    assert grade.reward == 1.0, grade.detail["tests"]["output"]


async def test_both_copies_are_made_at_once_and_a_set_up_that_fails_is_told_as_itself(
    provider: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_now, most = 0, 0
    prepare = judged_copy.prepare_workspace

    async def counted(*args: Any) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        try:
            await prepare(*args)
        finally:
            open_now -= 1

    monkeypatch.setattr(judged_copy, "prepare_workspace", counted)
    await graded(provider, {}, check_sh='"$AS_WORK" true\n')
    assert (most, open_now) == (2, 0)
    task = checked(check_sh='"$AS_WORK" true\n').model_copy(update={"setup": ("exit 3",)})
    with pytest.raises(TaskFailed, match="ended 3"):
        await grader(provider).grade(task, work({}))
    assert provider.left == 0


async def test_too_much_that_waits_ends_the_lane() -> None:
    lane = _Lane()
    lane.put(b"x")
    lane.put(bytes(_MOST_WAITING))
    lane.put(b"late")
    assert (await lane.get(), await lane.get()) == (b"x", b"")


async def test_a_command_that_launches_nothing_has_one_sandbox(provider: Watched) -> None:
    made = len(provider.made)
    assert (await graded(provider, {"done": ""}, check_sh="test -e done\n")).reward == 1.0
    assert len(provider.made) == made + 1
