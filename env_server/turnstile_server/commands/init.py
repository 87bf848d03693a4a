"""``turnstile init``: a folder with a task of one's own, a test that plays it, and what to do with them.

Exit codes: 0; 1 where the folder is there already; 2 for a name that cannot be one, or a place that cannot be
written.
"""

from __future__ import annotations

import keyword
import os
import re
import shutil
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from turnstile.visible import visible

SCAFFOLD = Path(__file__).parent / "scaffold"
FILES = {
    "world.py": "world.py.template",
    "test_{module}.py": "test_world.py.template",
    "README.md": "README.md.template",
}
EXISTS = 1
USAGE = 2
MAX_NAME = 50
"""So that an id that is made from the name stays below 64 characters."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([_-][A-Za-z0-9]+)*")
_TAKEN = frozenset({"World", "WorldTask", "ToolError"})
"""Names that the file itself imports."""


def init(
    name: Annotated[str, typer.Argument(help="Name of the folder and of the task: letters, digits, `-` and `_`.")],
) -> None:
    """Make a folder NAME with a task as a Python class, and a test that plays it without a model."""
    class_name = class_name_of(name)
    if class_name is None:
        _fail(
            f"{name!r} cannot be a name: it begins with a letter, has letters, digits and single `-` or `_` "
            f"between them, at most {MAX_NAME} characters, and is no word of Python's: like lamp-game",
            USAGE,
        )
    folder = Path(name)
    if os.path.lexists(folder):
        _fail(f"there is already something at {folder}; nothing was written. Choose another name.", EXISTS)
    try:
        write_scaffold(folder, name, class_name)
    except OSError as error:
        _fail(f"{folder} cannot be written: {error.strerror or error}", USAGE)
    typer.echo(f"Made {folder}/ with {', '.join(sorted(path.name for path in folder.iterdir()))}. Next:")
    for line in (f"cd {folder}", "turnstile tasks validate world.py", "pytest"):
        typer.echo(f"  {line}")


def class_name_of(name: str) -> str | None:
    """The class for a task of this name, ``LampGame`` for ``lamp-game``; None where it cannot be one."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        return None
    class_name = "".join(part[:1].upper() + part[1:] for part in re.split("[-_]", name))
    return None if keyword.iskeyword(class_name) or class_name in _TAKEN else class_name


def write_scaffold(folder: Path, name: str, class_name: str) -> None:
    """Makes ``folder``, whole or not at all. Raises OSError, also where it is there."""
    folder.mkdir()
    try:
        for target, template in FILES.items():
            text = (SCAFFOLD / template).read_text("utf-8")
            path = folder / target.format(module=name.replace("-", "_").lower())
            path.write_text(text.replace("@CLASS@", class_name).replace("@ID@", name), "utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _fail(sentence: str, code: int) -> NoReturn:
    typer.echo(visible(f"turnstile: {sentence}", lines=True), err=True)
    raise typer.Exit(code)
