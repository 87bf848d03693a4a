"""The launcher: a command that judges runs programs as the work's user, and nobody else does."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from sandbox_providers import Backend

from turnstile_server.grading.inside import launch as launch_module
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.protocol import Command, ExecResult, User

pytestmark = pytest.mark.anyio

LAUNCH = Path(launch_module.__file__).read_bytes()


async def as_tests(
    sandbox: HelperSandbox, script: str, *, launches: bool = True, timeout_s: float = 60
) -> ExecResult:
    """Runs Python as the tests' user, with ``launch`` imported."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("launch.py")
        info.size = len(LAUNCH)
        archive.addfile(info, io.BytesIO(LAUNCH))
    await sandbox.upload(out.getvalue(), "/tmp/programs")
    start = "import os, sys, json, time, signal\nsys.path.insert(0, '/tmp/programs')\nimport launch\n"
    user = User.WORK if launches else None
    return await sandbox.exec(
        Command(("python3", "-c", start + script), user=User.TESTS, timeout_s=timeout_s, launches=user)
    )


async def test_a_program_runs_as_the_work_with_its_own_streams_folder_and_environment(
    sandbox: HelperSandbox, backend: Backend
) -> None:
    script = """
read, write = os.pipe()
inside = "import os, sys; print(os.getuid(), os.getcwd(), os.environ['A'], os.environ['HOME'], sys.stdin.read())"
start, end = os.pipe()
os.write(end, b"hello"); os.close(end)
one = launch.launch(["python3", "-c", inside], stdio=(start, write, write), cwd="/tmp", env={"A": "b"})
os.close(write)
print(json.dumps([os.getuid(), one.wait(), os.read(read, 1000).decode()]))
"""
    done = await as_tests(sandbox, script)
    assert done.exit_code == 0, done
    uid, answer, said = json.loads(done.stdout)
    assert answer == {"exit_code": 0, "timed_out": False}
    work_uid, *rest = said.split()
    assert rest[0] == "/tmp"
    assert rest[1] == "b"
    assert rest[3] == "hello"
    assert (int(work_uid) != uid) is backend.own_uids


@pytest.mark.slow
async def test_exit_status_signal_time_and_a_missing_program_are_told(sandbox: HelperSandbox) -> None:
    script = """
def ran(*argv, timeout_s=None, **more):
    return launch.launch(argv, stdio=(0, 2, 2), timeout_s=timeout_s, **more).wait()
print(json.dumps([
    ran("sh", "-c", "exit 7"), ran("sh", "-c", "kill -9 $$"), ran("no-such-program"), ran("true", cwd="/no/such"),
    ran("sleep", "60", timeout_s=0.2),
]))
"""
    done = await as_tests(sandbox, script)
    assert done.exit_code == 0, done
    assert [one["exit_code"] for one in json.loads(done.stdout)] == [7, 137, 127, 126, 137]
    assert [one["timed_out"] for one in json.loads(done.stdout)] == [False, False, False, False, True]


async def test_a_launched_program_has_no_other_descriptor_and_no_launcher(sandbox: HelperSandbox) -> None:
    script = """
secret, kept = os.pipe()
os.set_inheritable(kept, True)
inside = (
    "import os; mine = '/proc/self/fd/'; open_ = sorted(n for n in os.listdir(mine) if os.path.exists(mine + n));"
    "print(open_, 'TURNSTILE_LAUNCHER' in os.environ, flush=True)"
)
launch.launch(["python3", "-c", inside], stdio=(0, 1, 2)).wait()
"""
    done = await as_tests(sandbox, script)
    assert done.stdout.decode().split("\n")[0] == "['0', '1', '2'] False", done


@pytest.mark.slow
async def test_a_command_without_the_word_gets_no_launcher(sandbox: HelperSandbox) -> None:
    script = """
try:
    launch.launch(["true"], stdio=(0, 1, 2))
except launch.CannotLaunch as error:
    print("none:", error)
"""
    assert (await as_tests(sandbox, script, launches=False)).stdout.startswith(b"none: there is no launcher here")


@pytest.mark.slow
async def test_what_is_launched_ends_with_its_client_and_with_the_command(sandbox: HelperSandbox) -> None:
    script = """
one = launch.launch(["sh", "-c", "sleep 71 & sleep 71"], stdio=(0, 2, 2))
two = launch.launch(["sh", "-c", "sleep 72 & sleep 72"], stdio=(0, 2, 2))
time.sleep(0.2)
one.kill()
print(one.wait()["exit_code"])
"""
    done = await as_tests(sandbox, script)
    assert done.stdout == b"137\n", done
    left = await sandbox.exec(Command(("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"), timeout_s=20))
    assert b"sleep 7" not in left.stdout


@pytest.mark.slow
async def test_daemons_of_the_work_end_with_a_sweep(sandbox: HelperSandbox) -> None:
    script = '''
daemon = (
    "import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n"
    "    if os.fork() == 0:\\n        time.sleep(7" "3)\\n    os._exit(0)\\nos.wait()"
)
# A program's process group ends with it, so it waits until the daemon has left that.
launch.launch(["python3", "-c", daemon], stdio=(0, 2, 2)).wait()
# The work sees its own processes, on every backend. What has ended may be seen for a moment.
count = """
i=0; while [ $i -lt 100 ]; do
  n=$(grep -aho 'sleep(7[3])' /proc/[0-9]*/cmdline | wc -l); [ "$n" = "$1" ] && break; i=$((i + 1)); sleep 0.1
done; echo $n"""
alive = lambda wanted: launch.launch(["sh", "-c", count, "sh", wanted], stdio=(0, 1, 2)).wait()
alive("1")
launch.sweep()
alive("0")
'''
    done = await as_tests(sandbox, script)
    assert done.stdout.split() == [b"1", b"0"], done


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_",
    [
        "b'nonsense'",
        "b'[]'",
        "b'{}'",
        'b\'{"argv": [], "cwd": null, "env": {}, "timeout_s": null}\'',
        "b'[' * 100000",
    ],
)
async def test_what_is_no_request_is_refused_and_disturbs_nothing(sandbox: HelperSandbox, request_: str) -> None:
    script = f"""
asked = launch._ask(b"launch", (0, 1, 2), None)
asked.sendall({request_} + b"\\n")
try:
    launch.Launched(asked).wait()
except launch.CannotLaunch as error:
    print("refused:", error)
launch._ask(b"nothing", (0,), None).recv(10)
launch._ask(b"launch", (0,), None).recv(10)
print(launch.launch(["true"], stdio=(0, 1, 2)).wait()["exit_code"])
"""
    done = await as_tests(sandbox, script)
    assert done.stdout.startswith(b"refused: not a request"), done
    assert done.stdout.endswith(b"\n0\n"), done


@pytest.mark.slow
async def test_what_runs_as_the_work_after_a_command_is_not_swept_with_it(sandbox: HelperSandbox) -> None:
    after = Command(("python3", "-c", "print('done')"), user=User.WORK, timeout_s=60)
    for _ in range(10):
        ended = await as_tests(sandbox, "launch.launch(['true'], stdio=(0, 2, 2)).wait()")
        assert ended.exit_code == 0, ended
        assert (await sandbox.exec(after)).stdout == b"done\n"
