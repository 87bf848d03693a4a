"""The tables, as Markdown."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from exactness.count import Counts
from exactness.dialects import DIALECTS
from exactness.gateway import Gateway
from exactness.play import Outcome
from exactness.scenarios import SCENARIOS
from gate_parts.report import machine

MARK: Final = "<!-- tables -->"
_COLUMNS: Final = (
    *("rows", "tokens in rows", "sampled", "given", "trained", "wrong", "other context", "logprob wrong"),
    *("given, untrained", "twice", "not given, trained", "version", "first byte s", "CPU ms/call", "the agent"),
)
_SAME: Final = ("rows", "wrong", "other_context", "untrained", "twice", "not_given", "logprobs_wrong")
"""Counts that tell dialects apart; the length of a prompt is the dialect's own."""


def line(outcome: Outcome) -> str:
    """For the terminal, while it runs."""
    figures = {name: value for name, value in asdict(outcome.counts).items() if value and name != "versions"}
    told = " ".join(f"{name}={value}" for name, value in figures.items())
    return f"{outcome.gateway} | {outcome.dialect} | {outcome.scenario}: {told} {outcome.failed or ''}"


def version_of(package: str, python: Path) -> str:
    script = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([str(python), "-c", script], check=False, capture_output=True, text=True)
    return done.stdout.strip() or "?"


def page(
    outcomes: Sequence[Outcome], chosen: Sequence[Gateway], versions: Mapping[str, str], reasons: Mapping[str, str]
) -> str:
    date = time.strftime("%Y-%m-%d", time.gmtime())
    parts = [f"{date}, {machine()}.", _about(chosen, versions, reasons)]
    parts += ["## All scenarios of a dialect together", _summary(outcomes)]
    first = next((one.name for one in DIALECTS if any(each.dialect == one.name for each in outcomes)), "")
    parts += [f"## Each scenario, dialect `{first}`"]
    parts += _by_scenario([each for each in outcomes if each.dialect == first])
    rest = _differing(outcomes, first)
    parts += [f"## Other dialects, where they differ from `{first}`"]
    parts += [_table(rest, ("dialect", "scenario", "gateway")) if rest else "Nowhere."]
    return "\n\n".join(parts)


def write(path: Path, text: str) -> None:
    """Puts the tables behind the page's mark. Raises SystemExit without the mark."""
    before, mark, _ = path.read_text().partition(MARK)
    if not mark:
        raise SystemExit(f"{path} has no line {MARK}: the tables go behind it")
    path.write_text(f"{before}{MARK}\n\n{text}\n")


def _about(chosen: Sequence[Gateway], versions: Mapping[str, str], reasons: Mapping[str, str]) -> str:
    rows = [
        "| gateway | package | engine's wire | says of itself | dialects that it lacks |",
        "|---|---|---|---|---|",
    ]
    for one in chosen:
        lacks = "; ".join(f"{', '.join(names)}: {why}" for why, names in _by_reason(one.missing).items()) or "-"
        package = f"`{one.package}` {versions[one.name]}"
        promise = f"not comparable: {reasons[one.name]}" if one.name in reasons else one.promise
        rows.append(f"| {one.name} | {package} | {one.engine_wire} | {_cell(promise)} | {lacks} |")
    return "\n".join(rows)


def _by_reason(missing: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, why in missing.items():
        found.setdefault(why, []).append(name)
    return found


def _summary(outcomes: Sequence[Outcome]) -> str:
    names = ["gateway", "dialect", "scenarios", "exact", "rows", "tokens in rows", "sampled", "given", "wrong"]
    names += ["given, untrained", "twice", "not given, trained", "versions right", "sampled for nobody"]
    lines = [_head(names, 2)]
    for gateway, dialect in dict.fromkeys((each.gateway, each.dialect) for each in outcomes):
        own = [each for each in outcomes if (each.gateway, each.dialect) == (gateway, dialect)]
        counts = [each.counts for each in own]
        cells = [str(len(own)), str(sum(one.exact for one in counts))]
        sums = ("rows", "tokens", "sampled", "given", "wrong", "untrained", "twice", "not_given")
        cells += [f"{sum(getattr(one, name) for one in counts):,}" for name in sums]
        told = sum(sum(one.versions.values()) for one in counts)
        cells.append(f"{sum(one.versions['right'] for one in counts):,} of {told:,}")
        cells.append(f"{sum(each.wasted for each in own):,}")
        lines.append(f"| {' | '.join([gateway, dialect, *cells])} |")
    return "\n".join(lines)


def _by_scenario(outcomes: Sequence[Outcome]) -> list[str]:
    parts = []
    for scenario in SCENARIOS:
        own = [each for each in outcomes if each.scenario == scenario.name]
        if own:
            parts += [f"**{scenario.name}**: {scenario.what}.", _table(own, ("gateway",))]
    return parts


def _table(outcomes: Sequence[Outcome], keys: Sequence[str]) -> str:
    lines = [_head((*keys, *_COLUMNS), len(keys))]
    for each in outcomes:
        cells = [getattr(each, key) for key in keys]
        lines.append(f"| {' | '.join([*cells, *_figures(each)])} |")
    return "\n".join(lines)


def _figures(outcome: Outcome) -> list[str]:
    counts = outcome.counts
    numbers = [counts.rows, counts.tokens, counts.sampled, counts.given, counts.trained, counts.wrong]
    numbers += [counts.other_context, counts.logprobs_wrong, counts.untrained, counts.twice, counts.not_given]
    cells = [f"{number:,}" for number in numbers]
    cells.append(_versions(counts))
    cells.append("-" if outcome.first_byte_s is None else f"{outcome.first_byte_s:.2f} of {outcome.whole_s:.2f}")
    cells.append("-" if outcome.cpu_ms is None else f"{outcome.cpu_ms:.1f}")
    cells.append("went on" if outcome.failed is None else f"gave up: {outcome.failed.split()[0]}")
    return cells


def _versions(counts: Counts) -> str:
    known = [name for name, number in counts.versions.items() if number]
    if len(known) == 1:
        return known[0]
    return ", ".join(f"{counts.versions[name]:,} {name}" for name in known) or "-"


def _differing(outcomes: Sequence[Outcome], first: str) -> list[Outcome]:
    base = {(each.gateway, each.scenario): each for each in outcomes if each.dialect == first}
    found = []
    for each in outcomes:
        other = base.get((each.gateway, each.scenario))
        if each.dialect == first or other is None:
            continue
        same = all(getattr(each.counts, name) == getattr(other.counts, name) for name in _SAME)
        if not same or (each.failed is None) != (other.failed is None):
            found.append(each)
    return found


def _head(names: Sequence[str], left: int) -> str:
    return f"| {' | '.join(names)} |\n|{'---|' * left}{'---:|' * (len(names) - left)}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
