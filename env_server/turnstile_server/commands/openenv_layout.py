"""``turnstile openenv layout``: the project as ``openenv push`` wants it, in a folder of its own.

``openenv push`` takes one flat layout: client, models and server at the root, with a README that a Hugging Face
Space reads. This repository has another one, for two packages. The command copies what the image is built from
(it reads ``server/Dockerfile``, so the two cannot differ) and writes the rest beside it. It sends nothing.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

USAGE = 2

DOCKERFILE = Path("server", "Dockerfile")
VALIDATED = Path("validation", "Dockerfile")
"""What `openenv validate` builds: it gives its container no variable, no key and nothing to write to but /tmp."""
_ALWAYS = (
    "openenv.yaml",
    "pyproject.toml",
    "uv.lock",
    "LICENSE",
    "server/app.py",
    "validation/runtime.json",
    str(DOCKERFILE),
    ".dockerignore",
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MOUNTED = re.compile(r"--mount=type=bind,source=([^,\s]+)")

_INIT = '''"""Turnstile as an OpenEnv environment: token-exact episodes from real language-model agents."""

from .client import TurnstileEnv, TurnstileTools

__all__ = ["TurnstileEnv", "TurnstileTools"]
'''

_CLIENT = '''"""Clients of the environment. ``base_url`` has the control key in it: ``https://HOST/k/KEY``."""

from openenv.core import GenericEnvClient, MCPToolClient


class TurnstileEnv(GenericEnvClient):
    """``reset``, ``step`` and ``state`` with dictionaries; ``models.py`` has their types."""


class TurnstileTools(MCPToolClient):
    """``list_tools`` and ``call_tool`` of an episode."""
'''

_MODELS = '''"""The types on the wire. They come with the server (``pip install '.[server]'``)."""

from turnstile_server.control.openenv.openenv_types import TurnstileAction, TurnstileObservation, TurnstileState

__all__ = ["TurnstileAction", "TurnstileObservation", "TurnstileState"]
'''

_README = """---
title: {title}
emoji: 🎟️
colorFrom: blue
colorTo: gray
sdk: docker
pinned: false
app_port: 8000
base_path: /health
tags:
  - openenv
---

# {title}

Turnstile as an [OpenEnv](https://github.com/huggingface/OpenEnv) environment: token-exact episodes from real
language-model agents. This folder was written by `turnstile openenv layout`; edit the project, not this copy.

```sh
openenv validate .                 # also builds validation/Dockerfile and plays validation/runtime.json in it
openenv build -t {name}
openenv push --no-interface --repo-id YOU/{name} --secret TURNSTILE_CONTROL_KEY="$KEY"
```

`--no-interface`: there is no web page at `/web`. The control key is a secret of the Space; clients have it in
their address:

```python
from openenv.core import GenericEnvClient

async with GenericEnvClient(base_url=f"https://YOU-{name}.hf.space/k/{{KEY}}") as env:
    print(await env.reset(seed=3))
```

Without a model the Space describes itself and refuses episodes. Give it one with variables of the Space:
`TURNSTILE_MODEL=tiny` and `TURNSTILE_ENGINE__KIND=trainer` (the training loop samples), or `sglang` with
`TURNSTILE_ENGINE__URL`. A Space has one port, so agents outside it cannot reach the model API; agents inside need
sandboxes, which a Space may not allow: `GET /sandboxes` says it.
"""

_SPACE = """
# A Hugging Face Space runs its container as uid 1000, which needs a folder of its own.
USER 0
RUN mkdir -p /home/user/data && chown -R 1000:1000 /home/user
USER 1000:1000
WORKDIR /home/user
ENV HOME=/home/user \\
    TURNSTILE_DATA_DIR=/home/user/data \\
    TURNSTILE_AGENTS__INSTALL_DIR=/home/user/data/agents
"""


_VALIDATION = """
# For `openenv validate` alone, which has no key, wants a number of every step, and writes to /tmp only. Never
# serve it: whoever reaches its port may do what the holder of the control key may.
ENV TURNSTILE_CONTROL__AUTH=false \\
    TURNSTILE_OPENENV__STEP_REWARD=0 \\
    TURNSTILE_MODEL=tiny \\
    TURNSTILE_ENGINE__KIND=trainer \\
    TURNSTILE_SANDBOXES__KIND=none \\
    TURNSTILE_DATA_DIR=/tmp/turnstile \\
    HOME=/tmp
"""


def layout(
    folder: Annotated[Path, typer.Argument(help="New or empty folder to write into.")],
    name: Annotated[str, typer.Option("--name", help="Name of the environment and of the Space.")] = "turnstile",
    source: Annotated[
        Path | None,
        typer.Option("--source", help="Checkout of Turnstile; none: the one that is installed, or here."),
    ] = None,
) -> None:
    """Write the layout that `openenv push` wants into a folder. Nothing is sent anywhere."""
    try:
        write_layout(folder, source or _checkout(), name)
    except (ValueError, OSError) as error:
        typer.echo(f"turnstile: {error}", err=True)
        raise typer.Exit(USAGE) from error
    typer.echo(f"{folder}: cd there, then: openenv validate . && openenv push --no-interface")


def write_layout(folder: Path, source: Path, name: str) -> None:
    """Raises ValueError for a folder with something in it, a source that is no checkout, a name that cannot be."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"--name {name!r}: letters, digits and . _ - only, at most 63")
    missing = [wanted for wanted in _ALWAYS if not (source / wanted).exists()]
    if missing:
        raise ValueError(f"{source} is no checkout of Turnstile: there is no {missing[0]}. Name one with --source")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder")
    dockerfile = (source / DOCKERFILE).read_text(encoding="utf-8")
    for path in dict.fromkeys((*_ALWAYS, *build_sources(dockerfile))):
        _copy(source / path, folder / path)
    manifest = (source / "openenv.yaml").read_text(encoding="utf-8")
    title = name.replace("_", " ").replace("-", " ").title()
    written = {
        "__init__.py": _INIT,
        "client.py": _CLIENT,
        "models.py": _MODELS,
        "server/__init__.py": '"""The server that OpenEnv starts."""\n',
        "README.md": _README.format(title=title, name=name),
        "openenv.yaml": _validated_without_a_key(re.sub(r"(?m)^name:.*$", f"name: {name}", manifest)),
        str(VALIDATED): dockerfile.rstrip("\n") + "\n" + _VALIDATION,
        str(DOCKERFILE): dockerfile.rstrip("\n") + "\n" + _SPACE,
    }
    for path, text in written.items():
        (folder / path).write_text(text, encoding="utf-8")
    (folder / "outputs").mkdir()


def _validated_without_a_key(manifest: str) -> str:
    """The manifest whose image is the one for the validator."""
    lines = [line for line in manifest.splitlines(keepends=True) if not line.lstrip().startswith("#")]
    text = "".join(lines).replace(f"dockerfile: {DOCKERFILE.as_posix()}", f"dockerfile: {VALIDATED.as_posix()}")
    return text.replace("requires_credentials: true", "requires_credentials: false")


def build_sources(dockerfile: str) -> list[str]:
    """The files and folders of the build context that a Dockerfile reads."""
    found: list[str] = []
    for line in dockerfile.replace("\\\n", " ").splitlines():
        words = line.split()
        if words[:1] == ["COPY"] and not any(word.startswith("--from") for word in words):
            found += [word for word in words[1:-1] if not word.startswith("--")]
        elif words[:1] == ["RUN"]:
            found += _MOUNTED.findall(line)
    return found


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"), dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


def _checkout() -> Path:
    """The checkout that this module is installed from; else the current folder."""
    installed_from = Path(__file__).resolve().parents[3]
    return installed_from if (installed_from / DOCKERFILE).is_file() else Path.cwd()
