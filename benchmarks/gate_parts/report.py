"""Rows as tables: on the terminal, as JSON, and as the section "The gate" of docs/performance.md."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
BEGIN = "<!-- benchmarks/gate.py writes from here -->"
END = "<!-- to here -->"
COLUMNS = (
    "server",
    "p50 ms",
    "p99 ms",
    "added p50",
    "CPU ms/call",
    "fsync ms/call",
    "turns/s",
    "turns per CPU s",
    "tokenized bytes",
)
AIM_ADDED_MS = 2.0
AIM_RATIO = 20.0


def machine() -> str:
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    memory = next(
        (int(line.split()[1]) >> 20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0
    )
    return (
        f"{os.cpu_count()} cores of {model}, {memory} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def tables(rows: list[Figures]) -> str:
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
                f"{row['fsync_ms']:.2f}" if row["fsyncs"] else "-",
                f"{row['turns_per_s']:.0f}" if row["turns_per_s"] >= 10 else f"{row['turns_per_s']:.1f}",
                f"{row['turns_per_cpu_s']:.0f}"
                if row["turns_per_cpu_s"] >= 10
                else f"{row['turns_per_cpu_s']:.1f}",
                f"{row['tokenized_bytes']:.0f}" if row["tokenized_bytes"] else "-",
            ]
            out.append("| " + " | ".join(cells) + " |")
        out.append("")
    return "\n".join(out)


def ratios(rows: list[Figures]) -> str:
    """Markdown: what is asked of the gate against what was measured."""
    by = {(row["server"], row["tokens"], row["stream"]): row for row in rows}
    ours = "turnstile-process"
    peers = sorted({row["server"] for row in rows if row["server"].startswith("peer")})
    head = ["history", "mode", "added p50 ms", "of it beyond the relay"]
    head += [f"turns/s, times {peer}" for peer in peers] + [f"turns per CPU s, times {peer}" for peer in peers]
    out = ["| " + " | ".join(head) + " |", "|---|---" + "|---:" * (len(head) - 2) + "|"]
    for server, length, stream in by:
        if server != ours:
            continue
        row = by[ours, length, stream]
        added = row["p50_ms"] - by["direct", length, stream]["p50_ms"]
        beyond = row["p50_ms"] - by["relay", length, stream]["p50_ms"]
        cells = [f"{length:,}", "streamed" if stream else "unstreamed", f"{added:.2f}", f"{beyond:.2f}"]
        for key in ("turns_per_s", "turns_per_cpu_s"):
            cells += [f"{row[key] / by[peer, length, stream][key]:.1f}" for peer in peers]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


def write_results(folder: Path, facts: dict[str, Any], rows: list[Figures], text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gate.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    (folder / "gate.md").write_text(text)


def write_docs(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replaces what lies between the two markers, of any benchmark; the words around them stay."""
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page.name} lacks the markers {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
