"""Rows as Markdown: one table per agent, for docs/agents-matrix.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from agents_matrix.row import Row

HEAD = """\
# Agents and faults

How the agents that ship behave under faults, measured live in Docker sandboxes with a scripted model. Written by
`make agents-matrix`, last on {day}. The faults are in `benchmarks/agents_matrix/faults.py`:

| fault | what goes wrong |
|---|---|
| `ok` | nothing |
| `rate_limit` | the first call is answered 429 with `retry-after: 1` |
| `server_error` | the first call is answered 502, the next 503 |
| `internal_error` | the first call is answered 500, which should not be tried again |
| `cut` | a streamed reply ends in an error after 60 tokens; an unstreamed one is a 503 |
| `malformed` | a tool call whose JSON does not parse; it is shown as text |
| `bad_arguments` | a tool call whose arguments are JSON and break the tool's schema |
| `empty` | a reply of nothing but the end of the turn |
| `too_long` | a reply that is cut by its length |
| `context_full` | a call is answered 400: the prompt is longer than the model's context |
| `subagent` | two sub-agents at once, if the agent offers them |
| `compaction` | long tool results until the agent summarises its history, if it does |

*done*: the agent came to the end of its task. *trained*: the share of sampled tokens that a sample trains. *wall*:
from the agent's start to its end. *memory*: the sandbox's peak, page cache included.
"""

COLUMNS = ("fault", "done", "ended", "calls", "refused", "turns", "samples", "trained", "untrained", "breaks")
MORE = ("cosmetic", "wall", "memory")


def markdown(rows: Sequence[Row]) -> str:
    ordered = sorted(rows, key=lambda row: row.agent)
    day = max((row.recorded for row in rows), default="never")
    parts = [HEAD.format(day=day)]
    for agent, group in groupby(ordered, key=lambda row: row.agent):
        mine = list(group)
        parts.append(f"\n## {agent} {mine[0].version}\n")
        parts.append(_line((*COLUMNS, *MORE)))
        parts.append("|" + "---|" * len((*COLUMNS, *MORE)))
        parts += [_line(_cells(row)) for row in mine]
    return "\n".join(parts) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row) -> tuple[str, ...]:
    if not row.fired:
        return (f"`{row.fault}`", *["none"], *[""] * (len(COLUMNS) + len(MORE) - 2))
    stats = row.stats
    sampled = stats["sampled_tokens"]
    return (
        f"`{row.fault}`",
        "yes" if row.finished else "no",
        f"{row.error or row.status}, {row.exit_code}",
        str(row.calls),
        _counts(row.refused),
        str(stats["turns"]),
        _counts(row.kinds),
        f"{100 * stats['trained_tokens'] / sampled:.0f} %" if sampled else "",
        _counts({**stats["untrained"], **{f"discarded {name}": n for name, n in stats["discarded"].items()}}),
        _counts(stats["breaks"]),
        _counts(stats["cosmetic"]),
        f"{row.wall_s:.0f} s",
        "" if row.memory_mb is None else f"{row.memory_mb} MB",
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
