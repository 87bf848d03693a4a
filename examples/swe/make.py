"""Makes six rows in the format of swebench 5, and a Docker image for each: small repositories with a history.

    python examples/swe/make.py OUT     then OUT/rows.jsonl, and images turnstile-swe:NAME

A repository's history goes on after the base: the commit that solves the issue, a tag, a remote branch. So the
images hold the solution, as published ones do, and whoever plays the rows must take it away from agents.

Needs git and a Docker engine; the base image is made by ``scripts/sandbox_image.sh``, from Debian packages.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
INSTANCES = HERE / "instances"
BASE_IMAGE = "turnstile-swe:base"
WORKDIR = "/testbed"
_WHO = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "Quill"), ("EMAIL", "quill@example.org"), ("DATE", "2026-01-05T12:00:00+00:00"))
}


@dataclass(frozen=True, slots=True)
class MadeRow:
    """One row, and the folder of its repository, which stands at the base."""

    row: dict[str, Any]
    repository: Path
    image: str


def make_row(instance: Path, folder: Path) -> MadeRow:
    """Authors the repository of an instance file in ``folder``."""
    said = yaml.safe_load(instance.read_text())
    git = _Git(folder)
    git("init", "--quiet", "--initial-branch=main")
    files: dict[str, str] = said["files"]
    first = sorted(files)[0]
    git.commit("Begin", {first: files[first], "README.md": f"# {said['repo']}\n"})
    base = git.commit("Add what there is", files)
    fixed = git.commit("Resolve the issue", {**said["solution"], **said["tests"]})
    git("tag", "v-next")
    git("update-ref", "refs/remotes/origin/main", fixed)
    changed = sorted(said["tests"])
    patch = git("diff", base, fixed, "--", ".", *(f":(exclude){path}" for path in changed))
    test_patch = git("diff", base, fixed, "--", *changed)
    git("reset", "--quiet", "--hard", base)
    image = f"turnstile-swe:{instance.stem}"
    row = {
        "instance_id": said["instance_id"],
        "repo": said["repo"],
        "version": said["version"],
        "base_commit": base,
        "environment_setup_commit": base,
        "created_at": "2026-01-05T12:00:00Z",
        "problem_statement": said["issue"],
        "hints_text": "",
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": json.dumps(said["fail_to_pass"]),
        "PASS_TO_PASS": json.dumps(said["pass_to_pass"]),
        "image": image,
        "log_parser": said["log_parser"],
        "eval_type": said.get("eval_type", "pass_and_fail"),
        "eval_script": _script(base, [path for path in changed if path in files], changed, test_patch, said),
    }
    return MadeRow(row, folder, image)


def _script(
    base: str, known: Sequence[str], changed: Sequence[str], test_patch: str, said: Mapping[str, Any]
) -> str:
    put_back = f"git checkout {base} {' '.join(known)}" if known else ":"
    new = [path for path in changed if path not in known]
    return "\n".join(
        [
            "#!/bin/bash",
            "set -uxo pipefail",
            f"cd {WORKDIR}",
            f"git config --global --add safe.directory {WORKDIR}",
            "git status",
            put_back,
            *([f"rm -f {' '.join(new)}"] if new else []),
            f"git apply -v - <<'EOF_114329324912'\n{test_patch}EOF_114329324912",
            ": '>>>>> Start Test Output'",
            said["test_command"],
            ": '>>>>> End Test Output'",
            put_back,
            "",
        ]
    )


class _Git:
    """Git in one folder, with the same hashes every time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, *arguments: str) -> str:
        env = {**os.environ, **_WHO, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        command = ("git", *arguments)
        return subprocess.run(
            command, cwd=self._folder, env=env, check=True, capture_output=True, text=True
        ).stdout

    def commit(self, message: str, files: Mapping[str, str]) -> str:
        for path, text in files.items():
            file = self._folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        self("add", "--all")
        self("commit", "--quiet", "--message", message)
        return self("rev-parse", "HEAD").strip()


def build_image(made: MadeRow, base_image: str) -> None:
    """The base image with the repository at ``/testbed``, which anybody may change, as in swebench's images."""
    dockerfile = f"FROM {base_image}\nCOPY testbed {WORKDIR}\nWORKDIR {WORKDIR}\n".encode()
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        info = tarfile.TarInfo("Dockerfile")
        info.size = len(dockerfile)
        archive.addfile(info, io.BytesIO(dockerfile))
        archive.add(made.repository, "testbed", filter=_open_to_all)
    subprocess.run(
        ("docker", "build", "--quiet", "--tag", made.image, "-"),
        input=context.getvalue(),
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _open_to_all(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = "root"
    info.mode |= 0o777 if info.isdir() else 0o666
    return info


def build_base(tag: str) -> None:
    """Python, pytest, git and bash."""
    script = HERE.parents[1] / "scripts" / "sandbox_image.sh"
    subprocess.run((str(script), tag, "git", "python3-pytest"), check=True)


def make(out: Path, base_image: str = BASE_IMAGE) -> Path:
    """Builds everything; the file of the rows."""
    build_base(base_image)
    out.mkdir(parents=True, exist_ok=True)
    rows = out / "rows.jsonl"
    with rows.open("w") as file, tempfile.TemporaryDirectory() as folder:
        for instance in sorted(INSTANCES.glob("*.yaml")):
            repository = Path(folder, instance.stem)
            repository.mkdir()
            made = make_row(instance, repository)
            build_image(made, base_image)
            file.write(json.dumps(made.row) + "\n")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder for rows.jsonl")
    print(f"made {make(parser.parse_args().out)}")
