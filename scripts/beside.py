"""Which frameworks can be installed beside the client, and beside the server: uv's resolver is asked, no more.

    python scripts/beside.py            prints the table
    python scripts/beside.py --write    writes it into docs/beside.md

Each framework is taken in the newest version that the index has: without that the resolver would go back to one
that asks for less. A line that cannot be has the first reason of the resolver. It needs an index, and minutes.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "beside.md"
BEGIN, END = "<!-- written by scripts/beside.py -->\n", "<!-- to here -->\n"
FRAMEWORKS: Final = (
    *("trl", "openenv", "openenv-core", "verifiers", "verl", "skyrl", "areal", "tinker", "nemo-gym"),
    *("sglang", "vllm", "gymnasium"),
)
PYTHON: Final = "3.12"
RESOLVE_S: Final = 300
_SPACE: Final = re.compile(r"\s+")
_OWN_VERSION: Final = re.compile(r"(turnstile-rl(?:\[\w+\])?)==\S+")


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the resolver says: the versions by name, or why there is no answer."""

    versions: dict[str, str]
    reason: str | None = None


def resolved(*requirements: str, deps: bool = True) -> Resolved:
    """Asks uv in an empty folder, so that nothing of a project's own bounds counts."""
    flags = ["--quiet", "--no-config", "--no-header", "--no-annotate", "--python-version", PYTHON]
    flags += [] if deps else ["--no-deps"]
    uv = str(Path(sys.executable).with_name("uv"))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [uv, "pip", "compile", *flags, "-"],
            input="\n".join(requirements),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=RESOLVE_S,
            check=False,
        )
    if done.returncode != 0:
        return Resolved({}, shortened(done.stderr))
    return Resolved(dict(line.split("==") for line in done.stdout.splitlines() if "==" in line))


def shortened(said: str) -> str:
    """The resolver's first reason in one line of a table."""
    text = _OWN_VERSION.sub(r"\1", _SPACE.sub(" ", said))
    return (text.partition("cause: ")[2] or text).partition(", we can conclude")[0].strip().replace("|", "\\|")


def cell(framework: str, extra: str) -> str:
    found = resolved(f"turnstile-rl{extra} @ {ROOT.as_uri()}", framework)
    return "yes" if found.reason is None else f"no: {found.reason}"


def table() -> str:
    lines = ["| framework | beside the client | beside the server |", "|---|---|---|"]
    for name in FRAMEWORKS:
        newest = resolved(name, deps=False)
        if newest.reason is not None:
            lines.append(f"| {name} | not on the index | |")
            continue
        framework = f"{name}=={newest.versions[name]}"
        lines.append(f"| `{framework}` | {cell(framework, '')} | {cell(framework, '[server]')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    found = f"{datetime.date.today()}, Python {PYTHON}, Linux.\n\n{table()}"
    if "--write" not in sys.argv:
        sys.stdout.write(found)
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{found}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
