"""The report of a campaign: as text for people, as JSON for machines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from campaign.checker import Counts, Finding
from campaign.crew import KILL_WORKER

VERDICTS = ("lost", "doubled", "wrong", "left behind")


@dataclass
class BackendReport:
    """``drawn``, ``effective``: faults by name. ``played``: misdeeds of the agents themselves. ``workers``:
    processes of the server that own episodes."""

    backend: str
    workers: int = 1
    drawn: Counter[str] = field(default_factory=Counter)
    effective: Counter[str] = field(default_factory=Counter)
    played: Counter[str] = field(default_factory=Counter)
    counts: Counts = field(default_factory=Counts)
    findings: list[Finding] = field(default_factory=list)
    first_fault: dict[str, int] = field(default_factory=dict)
    """Per finding: how many faults had been drawn when it was seen."""
    episodes: int = 0
    starts: dict[str, int] = field(default_factory=dict)
    not_possible: list[str] = field(default_factory=list)

    def untried(self) -> list[str]:
        """What did not happen without which nothing was tried."""
        found = [
            ("no agent got a reply", self.counts.acknowledged > 0),
            ("no fault took effect", self.effective.total() > 0),
            ("no worker was killed", self.workers == 1 or self.effective[KILL_WORKER] > 0),
        ]
        return [what for what, happened in found if not happened]

    def verdicts(self) -> dict[str, int]:
        found = Counter[str](finding.verdict for finding in self.findings)
        return {verdict: found[verdict] for verdict in VERDICTS}


@dataclass
class Report:
    seed: int
    minutes: float
    backends: list[BackendReport]
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Nothing was found, and there was something to find."""
        return not any(each.findings or each.untried() for each in self.backends)

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seconds": round(self.seconds),
            "sound": self.sound,
            "backends": [
                {
                    "backend": each.backend,
                    "faults": {
                        name: {"drawn": drawn, "took_effect": each.effective[name]}
                        for name, drawn in sorted(each.drawn.items())
                    },
                    "took_effect": each.effective.total(),
                    "played_by_agents": dict(sorted(each.played.items())),
                    "episodes": each.episodes,
                    "replies_acknowledged": each.counts.acknowledged,
                    "turns": each.counts.turns,
                    "tokens": each.counts.tokens,
                    "untrained": dict(each.counts.untrained),
                    "starts": each.starts,
                    "not_possible": each.not_possible,
                    "verdicts": each.verdicts(),
                    "findings": [str(finding) for finding in each.findings],
                }
                for each in self.backends
            ],
        }

    def as_text(self, command: str) -> str:
        lines = [f"campaign: seed {self.seed}, {self.seconds:.0f} s"]
        for each in self.backends:
            verdicts = ", ".join(f"{count} {verdict}" for verdict, count in each.verdicts().items())
            lines += [
                "",
                f"{each.backend}: {each.effective.total()} faults took effect of {each.drawn.total()}; {verdicts}",
                f"  {each.episodes} episodes, {each.counts.acknowledged} replies that agents got, "
                f"{each.counts.turns} turns, {each.counts.tokens} tokens held against each other; "
                f"starts: {each.starts}",
                f"  untrained: {dict(each.counts.untrained)}",
            ]
            if each.not_possible:
                lines.append(f"  not possible here: {', '.join(each.not_possible)}")
            lines += [
                f"  {name:<28} {each.effective[name]:>5} of {drawn:>5}"
                for name, drawn in sorted(each.drawn.items())
            ]
            lines += [f"  {name:<28} {count:>5} played by agents" for name, count in sorted(each.played.items())]
        lines.append("")
        for each in self.backends:
            for finding in each.findings:
                first = each.first_fault.get(str(finding), each.drawn.total())
                lines += [f"{each.backend}: {finding}", f"  again: {command} --faults {first}"]
            lines += [f"{each.backend}: {what}, so nothing was tried" for what in each.untried()]
        found = sum((Counter(each.verdicts()) for each in self.backends), Counter[str]())
        counts = ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS)
        lines.append(f"{'sound' if self.sound else 'NOT SOUND'}: {counts}")
        return "\n".join(lines)
