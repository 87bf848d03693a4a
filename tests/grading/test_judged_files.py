"""What hidden tests in Python read of the work's folders: regular files that lie there."""

from __future__ import annotations

import pytest
from grading_support import Watched, grader, the_task, work

pytestmark = pytest.mark.anyio

HIDDEN = """
import bz2, filecmp, io, json, os, pathlib, shutil, tarfile, tempfile, unittest
from mathx import write
EXPECTED = pathlib.Path(__file__).with_name("expected.txt")
READ = {
    "open": lambda path: open(path).read(),
    "io": lambda path: io.open(path, encoding="utf-8").read(),
    "pathlib": lambda path: pathlib.Path(path).read_text(),
    "bytes": lambda path: pathlib.Path(path).read_bytes().decode(),
    "os": lambda path: os.read(os.open(path, os.O_RDONLY), 100).decode(),
    "opener": lambda path: open(path, opener=os.open).read(),
    "bz2": lambda path: bz2._builtin_open(path).read(),
    "tarfile": lambda path: tarfile.bltn_open(path).read(),
    "copy": lambda path: pathlib.Path(shutil.copy(path, tempfile.mkdtemp())).read_text(),
    "fdopen": lambda path: os.fdopen(os.open(os.fsencode(path), os.O_RDONLY)).read(),
}
class Hidden(unittest.TestCase):
    def test_read(self):
        for name, read in READ.items():
            with self.subTest(name), open(EXPECTED) as want:
                write("out.txt", want.fileno())
                self.assertEqual(read("out.txt"), EXPECTED.read_text())
    def test_deceived(self):
        for name, read in READ.items():
            with self.subTest(name), open(EXPECTED) as want, self.assertRaises(OSError):
                write("out.txt", want.fileno())
                read("out.txt")
    def test_made(self):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as want:
            want.write("5\\n")
            want.flush()
            path = os.path.join(folder, "out.txt")
            write(path, want.fileno())
            self.assertEqual(open(path).read(), "5\\n")
    def test_compared(self):
        write("out.txt", 0)
        self.assertTrue(filecmp.cmp("out.txt", EXPECTED))
    def test_written(self):
        with open("in.txt", "w") as file:
            file.write("1")
        self.assertEqual(os.stat("in.txt").st_mode & 0o111, 0)
        os.makedirs("folder", exist_ok=True)
        os.symlink("../in.txt", "folder/link")
        self.assertEqual(open("folder/link").read(), "1")
        os.unlink("folder/link")
        with self.assertRaises(FileNotFoundError):
            open("folder/link")
        self.assertEqual(json.load(open(1 and EXPECTED)), 5)
"""
WRITE = {
    "a file": ("open(path, 'w').write('5\\n')", 1.0),
    "a link within the folder": (
        "open('true.txt', 'w').write('5\\n'); os.symlink(os.path.abspath('true.txt'), path)",
        1.0,
    ),
    "a link to what the test has open": ("os.symlink(f'/proc/self/fd/{number}', path)", 0.0),
    "the same by way of /dev": ("os.symlink(f'/dev/fd/{number}', path)", 0.0),
    "by a link to a link": (
        "os.symlink(f'/proc/self/fd/{number}', 'other' + str(number))\n"
        "    os.symlink(os.path.abspath('other' + str(number)), path)",
        0.0,
    ),
}


async def test_no_time_of_a_hidden_file_is_known(provider: Watched) -> None:
    """``filecmp.cmp`` takes files of one size and one time for equal."""
    for code, reward in (("file.write('5\\n')", 1.0), ("file.write('4\\n')", 0.0)):
        made = f"import os\ndef write(path, number):\n    with open(path, 'w') as file:\n        {code}\n"
        made += "    os.utime(path, (0, 0))\n"
        tests = {
            "files": {"inline": {"test_hidden.py": HIDDEN, "expected.txt": "5\n"}},
            "expected": ["test_hidden.Hidden.test_compared"],
        }
        grade = await grader(provider).grade(the_task(tests=tests), work({"mathx/__init__.py": made}))
        assert grade.reward == reward, grade.detail


@pytest.mark.parametrize("how", WRITE)
@pytest.mark.parametrize("test", ["read", "made"])
async def test_a_file_is_what_the_work_wrote(provider: Watched, test: str, how: str) -> None:
    code, reward = WRITE[how]
    made = (
        "import os\ndef write(path, number):\n    if os.path.lexists(path):\n        os.unlink(path)\n"
        "    if os.path.lexists('other' + str(number)):\n        os.unlink('other' + str(number))\n"
        f"    {code}\n"
    )
    tests = {
        "files": {"inline": {"test_hidden.py": HIDDEN, "expected.txt": "5\n"}},
        "expected": [f"test_hidden.Hidden.test_{test}", "test_hidden.Hidden.test_written"],
    }
    grade = await grader(provider).grade(the_task(tests=tests), work({"mathx/__init__.py": made}))
    assert grade.reward == reward, grade.detail
    if not reward and test == "read":  # by none of the ways to read
        tests["expected"] = ["test_hidden.Hidden.test_deceived"]
        grade = await grader(provider).grade(the_task(tests=tests), work({"mathx/__init__.py": made}))
        assert grade.reward == 1.0, grade.detail
        return
    failed = {one["id"] for one in grade.detail["tests"].get("failed", ())}
    assert failed == (set() if reward else {f"test_hidden.Hidden.test_{test}"})


async def test_an_object_that_is_a_path_is_asked_once(provider: Watched) -> None:
    """Else it is a harmless path when it is looked at, and another one when it is opened."""
    made = """
import os
class Path:
    def __init__(self, *paths):
        self.paths = list(paths)
    def __fspath__(self):
        return self.paths.pop(0) if len(self.paths) > 1 else self.paths[0]
def write(path, number):
    if os.path.lexists(path):
        os.unlink(path)
    os.symlink(f"/proc/self/fd/{number}", path)
    return Path("/etc/hostname", os.path.abspath(path))
"""
    hidden = """
import pathlib, unittest
from mathx import write
EXPECTED = pathlib.Path(__file__).with_name("expected.txt")
class Hidden(unittest.TestCase):
    def test_once(self):
        with open(EXPECTED) as want:
            try:
                said = open(write("out.txt", want.fileno())).read()
            except OSError:
                return
            self.assertNotEqual(said, EXPECTED.read_text())
"""
    tests = {
        "files": {"inline": {"test_hidden.py": hidden, "expected.txt": "5\n"}},
        "expected": ["test_hidden.Hidden.test_once"],
    }
    grade = await grader(provider).grade(the_task(tests=tests), work({"mathx/__init__.py": made}))
    assert grade.reward == 1.0, grade.detail
