"""What the proof measured, as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def tables(rows: Sequence[Row]) -> str:
    """Of the rows of ``gpu_proof.json``: tokens per second, distances, updates, the learning run, failures."""
    out: list[str] = []
    for heading, lines in (
        ("| dtype | calls in flight | called | tokens/s |", _loads(rows)),
        ("| dtype | weights | tokens | compared with | max | mean | p99 |", _distances(rows)),
        ("| dtype of the engine | of the tensors | MB | first | median | slowest |", _updates(rows)),
        ("| run | dtype | held out, before | after | steps | reward, first and last | minutes |", _learned(rows)),
        ("| failed | why |", _failures(rows)),
    ):
        found = list(lines)
        if found:
            columns = heading.count("|") - 1
            out += [heading, "|---" * columns + "|", *found, ""]
    return "\n".join(out)


def _of(rows: Iterable[Row], part: str) -> Iterator[Row]:
    return (row for row in rows if row["part"] == part and "failed" not in row)


def _loads(rows: Sequence[Row]) -> Iterator[str]:
    for row in _of(rows, "load"):
        rate = f"{row['tokens_per_s']:,.0f}"
        yield f"| {row['dtype']} | {row['concurrent']} | {row['through']} | {rate} |"


def _distances(rows: Sequence[Row]) -> Iterator[str]:
    for row in _of(rows, "distances"):
        audit, exact = row["audit"], row["float32"]
        head = f"| {row['dtype']} | {', '.join(row['weights'])} | {row['tokens']:,}"
        yield (
            f"{head} | the engine's own score | {audit['max']:.2g} | {audit['mean']:.2g} | "
            f"{audit['p99_of_the_worst_episode']:.2g} (of the worst episode) |"
        )
        yield f"{head} | a float32 forward | {exact['max']:.2g} | {exact['mean']:.2g} | {exact['p99']:.2g} |"


def _updates(rows: Sequence[Row]) -> Iterator[str]:
    for row in _of(rows, "update"):
        times = " | ".join(f"{row[name]:.2f} s" for name in ("first_s", "median_s", "slowest_s"))
        yield f"| {row['dtype']} | {row['tensors']} | {row['bytes'] / 1e6:,.0f} | {times} |"


def _learned(rows: Sequence[Row]) -> Iterator[str]:
    for row in _of(rows, "learn"):
        rewards = row["rewards"]
        ends = f"{rewards[0]:.2f}, {rewards[-1]:.2f}" if rewards else "-"
        held = " | ".join(f"{row[name]:.1%}" if row[name] is not None else "-" for name in ("before", "after"))
        yield f"| tiny policy | {row['dtype']} | {held} | {len(rewards)} | {ends} | {row['seconds'] / 60:.1f} |"


def _failures(rows: Sequence[Row]) -> Iterator[str]:
    return (f"| {row['part']} | {row['failed'].strip().splitlines()[-1]} |" for row in rows if "failed" in row)
