"""What ``benchmarks/gate.py`` measured, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from gate_parts.aims import OURS, Aim
from gate_parts.calls import CallCounts
from gate_parts.memory import MemoryCost
from gate_parts.row import Figures

CALLS_BEGIN = "<!-- benchmarks/gate.py --count-calls writes from here -->"
CALLS_END = "<!-- to here, calls -->"
COLUMNS = (
    "server",
    "p50 ms",
    "p99 ms",
    "added p50",
    "CPU ms/call",
    "mean CPU",
    "first text ms",
    "fsync ms/call",
    "turns/s",
    "turns per CPU s",
    "tokenized bytes",
)


def aims_table(aims: Sequence[Aim]) -> str:
    """Markdown: each aim against what this run measured."""
    words = {True: "reached", False: "not reached", None: "-"}
    out = ["| aim, as a ratio within this run | measured | |", "|---|---|---|"]
    out += [f"| {aim.wanted} | {aim.measured} | {words[aim.reached]} |" for aim in aims]
    return "\n".join(out) + "\n"


def tables(rows: Sequence[Figures]) -> str:
    """Markdown: one table per length and mode."""
    out: list[str] = []
    for length, stream in sorted(
        {(row["tokens"], row["stream"]) for row in rows}, key=lambda key: (key[1], key[0])
    ):
        group = [row for row in rows if (row["tokens"], row["stream"]) == (length, stream)]
        out.append(f"**{length:,} tokens of history, {'streamed' if stream else 'unstreamed'}**\n")
        out.append("| " + " | ".join(COLUMNS) + " |")
        out.append("|---" + "|---:" * (len(COLUMNS) - 1) + "|")
        direct = group[0]
        for row in group:
            cells = [
                row["server"],
                f"{row['p50_ms']:.2f}",
                f"{row['p99_ms']:.2f}",
                "-" if row is direct else f"{row['p50_ms'] - direct['p50_ms']:.2f}",
                f"{row['cpu_ms']:.2f}",
                f"{row['cpu_mean_ms']:.2f}",
                f"{row['first_text_p50_ms']:.2f}" if "first_text_p50_ms" in row else "-",
                f"{row['fsync_ms']:.2f}" if row["fsyncs"] else "-",
                _rate(row["turns_per_s"]),
                _rate(row["turns_per_cpu_s"]),
                f"{row['tokenized_bytes']:.0f}" if row["tokenized_bytes"] else "-",
            ]
            out.append("| " + " | ".join(cells) + " |")
        out.append("")
    return "\n".join(out)


def ratios(rows: Sequence[Figures]) -> str:
    """Markdown: Turnstile against the relay and against each peer, at each length."""
    by = {(row["server"], row["tokens"], row["stream"]): row for row in rows}
    names = {row["server"]: None for row in rows}
    peers = [name for name in names if name.startswith(("rllm", "agentcore"))]
    head = ["history", "mode", "added p50 ms", "of it beyond the relay", "CPU, times the relay's"]
    head += [f"turns per CPU s, times {peer}" for peer in peers]
    out = ["| " + " | ".join(head) + " |", "|---|---" + "|---:" * (len(head) - 2) + "|"]
    for server, length, stream in by:
        if server != OURS:
            continue
        row, relay = by[OURS, length, stream], by["relay", length, stream]
        added = row["p50_ms"] - by["direct", length, stream]["p50_ms"]
        beyond = row["p50_ms"] - relay["p50_ms"]
        cells = [f"{length:,}", "streamed" if stream else "unstreamed", f"{added:.2f}", f"{beyond:.2f}"]
        cells.append(f"{row['cpu_ms'] / relay['cpu_ms']:.1f}")
        cells += [f"{row['turns_per_cpu_s'] / by[peer, length, stream]['turns_per_cpu_s']:.1f}" for peer in peers]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


def memory_table(cost: MemoryCost) -> str:
    """Markdown: what episodes cost in memory, in MB of 10^6 bytes."""
    rows = [
        (f"a trace of {cost.trace_tokens:,} tokens (of {cost.traces})", cost.trace_hot_mb, cost.trace_rest_mb),
        (
            f"the process with {cost.open_episodes} open episodes of {cost.open_tokens:,} tokens",
            cost.open_hot_mb,
            cost.open_rest_mb,
        ),
        ("the process before its first call", cost.empty_mb, cost.empty_mb),
    ]
    out = [f"| private memory | hot MB | after {cost.rest_s:g} s at rest MB |", "|---|---:|---:|"]
    out += [f"| {name} | {hot:.2f} | {rest:.2f} |" for name, hot, rest in rows]
    return "\n".join(out) + "\n"


def calls_table(counts: Sequence[CallCounts]) -> str:
    """Markdown: calls of functions per turn, which depend little on how busy the machine is."""
    out = ["| history | mode | server | Python frames per turn | C functions per turn | frames per idle second |"]
    out.append("|---|---|---|---:|---:|---:|")
    for one in counts:
        mode = "streamed" if one.stream else "unstreamed"
        cells = [f"{one.tokens:,}", mode, one.server, f"{one.python:,.0f}", f"{one.c:,.0f}", f"{one.idle:,.0f}"]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
