"""Capture gateways before the same scripted agents and faults, and what a trainer then gets of each.

    python benchmarks/exactness [--python openenv=PYTHON …] [--gateways NAME …] [--dialects NAME …]
                                [--scenarios TEXT …] [--model FOLDER] [--out DIR] [--write]

Turnstile runs from this environment. Every other gateway runs in an environment of its own, as published; without
its ``--python`` it is left out:

    python -m venv /tmp/openenv && /tmp/openenv/bin/pip install openenv==0.10.0              --python openenv=…
    python -m venv /tmp/rllm && /tmp/rllm/bin/pip install rllm-model-gateway                 --python rllm=…
    python -m venv /tmp/agentcore && /tmp/agentcore/bin/pip install 'agentcore-rl-toolkit[gateway]==0.2.0'
                                                                                             --python agentcore=…
    python -m venv /tmp/verifiers && /tmp/verifiers/bin/pip install verifiers==0.4.0      --python verifiers=…

Same plan and seed for all: the stand-in engine (``engine.py``) samples the same replies. ``--write`` puts the
tables into docs/exactness.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from exactness import report  # noqa: E402
from exactness.agentcore import Agentcore  # noqa: E402
from exactness.dialects import DIALECTS, Dialect  # noqa: E402
from exactness.gateway import Gateway, NotComparable  # noqa: E402
from exactness.openenv_capture import OpenEnvCapture  # noqa: E402
from exactness.ours import Turnstile  # noqa: E402
from exactness.plan import MODEL  # noqa: E402
from exactness.play import EngineProcess, Outcome, play  # noqa: E402
from exactness.rllm_gateway import RllmGateway  # noqa: E402
from exactness.scenarios import SCENARIOS, Scenario  # noqa: E402
from exactness.verifiers_client import Verifiers  # noqa: E402

PAGE = ROOT / "docs" / "exactness.md"


def gateways(pythons: dict[str, Path], model: Path, folder: Path) -> list[Gateway]:
    """Those whose environment is given."""
    made: list[Gateway] = [Turnstile(Path(sys.executable), model, folder)]
    if "openenv" in pythons:
        made.append(OpenEnvCapture(pythons["openenv"], folder))
    if "rllm" in pythons:
        made.append(RllmGateway(pythons["rllm"], folder))
    if "agentcore" in pythons:
        made += [Agentcore(pythons["agentcore"], model, folder, mode) for mode in ("tree", "linear")]
    if "verifiers" in pythons:
        made.append(Verifiers(pythons["verifiers"], model, folder))
    return made


async def compared(
    chosen: Sequence[Gateway],
    model: Path,
    folder: Path,
    scenarios: Sequence[Scenario],
    dialects: Sequence[Dialect],
) -> tuple[list[Outcome], dict[str, str]]:
    """All outcomes; and why a gateway has none."""
    outcomes: list[Outcome] = []
    reasons: dict[str, str] = {}
    async with EngineProcess(model, folder) as engine:
        for gateway in chosen:
            try:
                await gateway.start(engine.url)
                for dialect in dialects:
                    if dialect.name in gateway.missing:
                        continue
                    await play(engine.url, gateway, SCENARIOS[0], dialect)  # fills caches; not counted
                    for scenario in scenarios:
                        outcomes.append(await play(engine.url, gateway, scenario, dialect))
                        print(report.line(outcomes[-1]), file=sys.stderr, flush=True)
            except NotComparable as error:
                reasons[gateway.name] = str(error)
                print(f"{gateway.name}: not comparable: {error}", file=sys.stderr)
            finally:
                await gateway.process.stop()
    return outcomes, reasons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--gateways", nargs="+", help="only those whose name has one of these texts")
    parser.add_argument("--dialects", nargs="+", help=f"only these of {', '.join(one.name for one in DIALECTS)}")
    parser.add_argument("--scenarios", nargs="+", help="only those whose name has one of these texts")
    parser.add_argument("--model", type=Path, default=MODEL, help="a folder with tokenizer and template")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results", help="folder for exactness.json")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/exactness.md")
    options = parser.parse_args()
    pythons = {name: Path(path).absolute() for name, _, path in (each.partition("=") for each in options.python)}
    wanted = options.scenarios or ("",)
    scenarios = [one for one in SCENARIOS if any(text in one.name for text in wanted)]
    dialects = [one for one in DIALECTS if not options.dialects or one.name in options.dialects]
    with tempfile.TemporaryDirectory(prefix="exactness-") as folder:
        made = gateways(pythons, options.model, Path(folder))
        names = options.gateways or ("",)
        chosen = [one for one in made if any(text.lower() in one.name.lower() for text in names)]
        outcomes, reasons = asyncio.run(compared(chosen, options.model, Path(folder), scenarios, dialects))
        versions = {one.name: report.version_of(one.package, one.python) for one in chosen}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "exactness.json").write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    page = report.page(outcomes, chosen, versions, reasons)
    print(page)
    if options.write:
        report.write(PAGE, page)


if __name__ == "__main__":
    main()
