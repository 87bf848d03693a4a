"""Thirty-two more task folders, made of one small sound one: what `task.toml`, images, tests and rewards may be.

    python examples/harbor/variants.py FOLDER

Each differs in one thing from the others, and its name says in which. `make harbor` plays them as well.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from pathlib import Path

CONFIG = """\
schema_version = "1.4"

[task]
name = "turnstile/{name}"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0
{verifier}
[environment]
build_timeout_sec = 120.0
cpus = 1
{environment}
"""
TEST = '#!/bin/bash\nif [ "$(cat done.txt)" = done ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'
SOLVE = "#!/bin/bash\necho done > done.txt\n"
_FROM = "FROM turnstile-example:base\nWORKDIR /app\n"
FILES = {
    "instruction.md": "Write `done` into done.txt, in the folder in which you are.\n",
    "environment/Dockerfile": _FROM,
    "tests/test.sh": TEST,
    "solution/solve.sh": SOLVE,
}
_NUMBER = "#!/bin/bash\nif [ -e done.txt ]; then echo {done}; else echo {nothing}; fi > /logs/verifier/{file}\n"
_STEP = '#!/bin/bash\n[ "$(cat {name}.txt)" = done ]; echo $((! $?)) > /logs/verifier/reward.txt\n'
_PICTURE = base64.b64encode(bytes(range(256))).decode()


def _reward(done: str, nothing: str = "0", file: str = "reward.txt") -> Mapping[str, str]:
    return {"tests/test.sh": _NUMBER.format(done=done, nothing=nothing, file=file)}


def _solved(by: str, test: str) -> Mapping[str, str]:
    return {
        "solution/solve.sh": f"#!/bin/bash\nset -e\n{by}\n",
        "tests/test.sh": f"#!/bin/bash\nif {test}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
    }


def _steps(more: str, strategy: str) -> Mapping[str, str | None]:
    """Three steps; the known solution fails the second."""
    files: dict[str, str | None] = {"instruction.md": None, "solution/solve.sh": None, "tests/test.sh": None}
    tables = ""
    for name in ("one", "two", "three"):
        wrong = "wrong" if name == "two" else "done"
        files[f"steps/{name}/instruction.md"] = f"Write `done` into {name}.txt.\n"
        files[f"steps/{name}/tests/test.sh"] = _STEP.format(name=name)
        files[f"steps/{name}/solution/solve.sh"] = f"#!/bin/bash\necho {wrong} > {name}.txt\n"
        tables += f'[[steps]]\nname = "{name}"\n{more if name == "two" else ""}\n'
    files["task.toml"] = f'multi_step_reward_strategy = "{strategy}"\n{CONFIG}{tables}'
    return files


VARIANTS: Mapping[str, Mapping[str, str | None]] = {
    # rewards
    "reward-half": _reward("0.5"),
    "reward-with-blanks": _reward('-e "\\n  0.25  \\n"'.replace("-e", "-en")),
    "reward-in-exponents": _reward("2.5e-1"),
    "reward-json-of-one": _reward("'{\"reward\": 0.5}'", "'{\"reward\": 0}'", "reward.json"),
    "reward-json-of-true": _reward("'{\"reward\": true}'", "'{\"reward\": false}'", "reward.json"),
    "reward-json-beside-others": _reward(
        '\'{"style": 0.1, "reward": 0.75}\'', '\'{"style": 1, "reward": 0}\'', "reward.json"
    ),
    "reward-json-before-text": {
        "tests/test.sh": "#!/bin/bash\necho 0.1 > /logs/verifier/reward.txt\n[ -e done.txt ] && r=0.9 || r=0.2\n"
        'echo "{\\"reward\\": $r}" > /logs/verifier/reward.json\n'
    },
    "reward-before-a-failure": {"tests/test.sh": f"{TEST}exit 3\n"},
    "reward-of-the-empty-work": _reward("1", "0.125"),
    "reward-missing": {"tests/test.sh": "#!/bin/bash\n[ ! -e done.txt ] || echo 1 > /logs/verifier/reward.txt\n"},
    "reward-of-no-number": _reward("1", "none"),
    # tests
    "tests-with-files": {
        "tests/test.sh": TEST.replace(
            '"$(cat done.txt)" = done', '"$(cat done.txt)" = "$(cat /tests/wanted.txt)"'
        ),
        "tests/wanted.txt": "done\n",
    },
    "tests-in-python": {
        "tests/test.sh": "#!/bin/bash\npython3 /tests/check.py > /logs/verifier/reward.txt\n",
        "tests/check.py": "import pathlib\nfound = pathlib.Path('done.txt')\n"
        "print(float(found.is_file() and found.read_text().strip() == 'done'))\n",
    },
    "tests-with-another-shebang": {
        "tests/test.sh": "#!/usr/bin/env python3\nimport pathlib\n"
        "pathlib.Path('/logs/verifier/reward.txt').write_text(str(int(pathlib.Path('done.txt').exists())))\n"
    },
    "tests-with-variables": {
        "task.toml": CONFIG.replace("{verifier}", '\n[verifier.env]\nWANTED = "done"\n'),
        "tests/test.sh": TEST.replace("= done", '= "$WANTED"'),
    },
    "tests-with-artifacts": {"tests/test.sh": f"{TEST}mkdir -p /logs/artifacts && cp done.txt /logs/artifacts/\n"},
    "tests-that-print-much": {"tests/test.sh": f"{TEST}yes told | head -c 2000000\n"},
    # images
    "image-with-its-files": {
        "environment/Dockerfile": f"{_FROM}COPY seed.txt ./\n",
        "environment/seed.txt": "done\n",
        **_solved("mv seed.txt done.txt", '[ "$(cat done.txt)" = done ] && [ ! -e seed.txt ]'),
    },
    "image-with-two-stages": {
        "environment/Dockerfile": "FROM turnstile-example:base AS made\nRUN mkdir /out && echo done > /out/it\n"
        f"{_FROM}COPY --from=made /out/it /opt/wanted\n",
        **_solved("cp /opt/wanted done.txt", "cmp -s done.txt /opt/wanted"),
    },
    "image-with-a-dockerignore": {
        "environment/Dockerfile": f"{_FROM}COPY . ./\n",
        "environment/.dockerignore": "hidden.txt\n",
        "environment/hidden.txt": "hidden\n",
        "environment/shown.txt": "shown\n",
        **_solved("ls > done.txt", "[ -e done.txt ] && [ -e shown.txt ] && [ ! -e hidden.txt ]"),
    },
    "image-with-a-users-folder": {
        "environment/Dockerfile": "FROM turnstile-example:base\nRUN mkdir -p /srv/work && chmod 777 /srv/work\n"
        "WORKDIR /srv/work\nENV GREETING=hello\n",
        **_solved('echo "$GREETING" > done.txt', '[ "$(cat done.txt)" = hello ]'),
    },
    "image-by-compose-with-arguments": {
        "environment/Dockerfile": "ARG BASE\nFROM ${BASE}\nARG WORD\n"
        "RUN mkdir -p /opt && echo $WORD > /opt/word\nWORKDIR /app\n",
        "environment/docker-compose.yaml": "services:\n  main:\n    build:\n      context: .\n      args:\n"
        "        BASE: turnstile-example:base\n        WORD: told\n",
        **_solved("cp /opt/word done.txt", '[ "$(cat done.txt)" = told ]'),
    },
    "image-with-a-link": {
        "environment/Dockerfile": f"{_FROM}RUN echo done > a.txt && ln -s a.txt b.txt\n",
        **_solved("ln -sf b.txt done.txt", '[ -L done.txt ] && [ "$(cat done.txt)" = done ]'),
    },
    # task.toml
    "config-of-much-memory": {
        "task.toml": CONFIG.replace("{environment}", "memory_mb = 2048\nstorage_mb = 9000\n")
    },
    "config-of-old-sizes": {"task.toml": CONFIG.replace("{environment}", 'memory = "2G"\nstorage = "10G"\n')},
    "config-of-a-work-folder": {
        "task.toml": CONFIG.replace("{environment}", 'workdir = "/app/inner"\n'),
        "environment/Dockerfile": "FROM turnstile-example:base\nRUN mkdir -p /app/inner\nWORKDIR /app\n",
    },
    "config-of-variables": {
        "task.toml": CONFIG.replace("{environment}", '\n[environment.env]\nWORD = "two words"\n'),
        **_solved('echo "$WORD" > done.txt', '[ "$(cat done.txt)" = "two words" ]'),
    },
    # works
    "work-of-many-kinds": _solved(
        f"mkdir -p 'a folder/é' empty && echo x > 'a folder/é/ü ñ.txt' && chmod 750 'a folder'\n"
        f"echo {_PICTURE} | base64 -d > picture.bin\n"
        "printf '#!/bin/sh\\necho ran\\n' > run.sh && chmod +x run.sh",
        "[ -d empty ] && [ -s 'a folder/é/ü ñ.txt' ] && [ \"$(./run.sh)\" = ran ] && "
        "[ $(wc -c < picture.bin) = 256 ]",
    ),
    "work-that-deletes": {
        "environment/Dockerfile": f"{_FROM}RUN mkdir -p old/er && touch old/er/x keep\n",
        **_solved("rm -rf old", "[ ! -e old ] && [ -e keep ]"),
    },
    "work-by-a-solution-of-files": {
        "solution/solve.sh": '#!/bin/bash\npython3 "$(dirname "$0")/make.py"\n',
        "solution/make.py": "open('done.txt', 'w').write('done\\n')\n",
    },
    # steps
    "steps-of-the-last": _steps("", "final"),
    "steps-below-a-least": _steps("min_reward = 0.5", "mean"),
}


def write_variants(folder: Path) -> None:
    """``folder``: made where it is missing; one folder in it for each of ``VARIANTS``."""
    for name, changes in VARIANTS.items():
        for path, text in {"task.toml": CONFIG, **FILES, **changes}.items():
            if text is None:
                continue
            file = folder / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            config = text.replace("{name}", name).replace("{verifier}", "").replace("{environment}", "")
            file.write_text(config if path == "task.toml" else text)
            if file.suffix == ".sh":
                file.chmod(0o755)


if __name__ == "__main__":
    write_variants(Path(sys.argv[1]))
