"""What is asked of the gate: ratios of one run, so that a faster or busier machine changes them little."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gate_parts.memory import MemoryCost
from gate_parts.row import Figures

OURS = "turnstile-process"
PEER = "rllm-memory"
SHORT, LONG = 8_000, 128_000
TIMES_RELAY = 4.0
TIMES_PEER_SHORT, TIMES_PEER_LONG = 6.0, 30.0
TIMES_SHORT = 1.3
TIMES_UNSTREAMED = 1.5
FIRST_TEXT_MS = 1.0
TRACE_TOKENS, TRACE_MB = 131_072, 0.8
OPEN_EPISODES, OPEN_TOKENS, OPEN_MB = 256, 32_768, 600.0


@dataclass(frozen=True, slots=True)
class Aim:
    """``reached`` None: this run did not measure it."""

    wanted: str
    measured: str = "not measured"
    reached: bool | None = None


def aims(rows: Sequence[Figures], memory: MemoryCost | None) -> list[Aim]:
    return [*_speed(rows), *_memory(memory)]


def _speed(rows: Sequence[Figures]) -> Iterator[Aim]:
    by = {(row["server"], row["tokens"], row["stream"]): row for row in rows}
    short, long = by.get((OURS, SHORT, False)), by.get((OURS, LONG, False))
    streamed, relay = by.get((OURS, SHORT, True)), by.get(("relay", SHORT, False))
    wanted = f"at {SHORT:,} tokens, unstreamed: at most {TIMES_RELAY:g} times the relay's CPU per call"
    yield _at_most(wanted, TIMES_RELAY, short, relay, "cpu_ms", "ms")
    for length, ours, least in ((SHORT, short, TIMES_PEER_SHORT), (LONG, long, TIMES_PEER_LONG)):
        wanted = f"at {length:,}, unstreamed: at least {least:g} times {PEER}'s turns per CPU second"
        peer = by.get((PEER, length, False))
        if ours is None or peer is None:
            yield Aim(wanted)
        else:
            times = ours["turns_per_cpu_s"] / peer["turns_per_cpu_s"]
            pair = f"{ours['turns_per_cpu_s']:.0f} and {peer['turns_per_cpu_s']:.0f}"
            yield Aim(wanted, f"{times:.1f} times ({pair})", times >= least)
    wanted = f"at {LONG:,}, unstreamed: at most {TIMES_SHORT:g} times the CPU per call at {SHORT:,}"
    yield _at_most(wanted, TIMES_SHORT, long, short, "cpu_ms", "ms")
    wanted = f"at {SHORT:,}, streamed with 40 events: at most {TIMES_UNSTREAMED:g} times the CPU of unstreamed"
    yield _at_most(wanted, TIMES_UNSTREAMED, streamed, short, "cpu_ms", "ms")
    wanted = f"at {SHORT:,}, streamed: first text within {FIRST_TEXT_MS:g} ms (p50) of the engine's first token"
    if streamed is None or "first_text_p50_ms" not in streamed:
        yield Aim(wanted)
    else:
        delay = streamed["first_text_p50_ms"]
        yield Aim(wanted, f"{delay:.2f} ms (p99 {streamed['first_text_p99_ms']:.2f})", delay <= FIRST_TEXT_MS)


def _at_most(wanted: str, most: float, one: Figures | None, other: Figures | None, key: str, unit: str) -> Aim:
    if one is None or other is None:
        return Aim(wanted)
    times = one[key] / other[key]
    return Aim(wanted, f"{times:.2f} times ({one[key]:.2f} and {other[key]:.2f} {unit})", times <= most)


def _memory(cost: MemoryCost | None) -> Iterator[Aim]:
    wanted = f"a trace of {TRACE_TOKENS:,} tokens in memory: under {TRACE_MB:g} MB, hot and at rest"
    if cost is None or cost.trace_tokens != TRACE_TOKENS:
        yield Aim(wanted)
    else:
        reached = max(cost.trace_hot_mb, cost.trace_rest_mb) < TRACE_MB
        yield Aim(wanted, f"{cost.trace_hot_mb:.2f} MB hot, {cost.trace_rest_mb:.2f} MB at rest", reached)
    wanted = f"{OPEN_EPISODES} open episodes of {OPEN_TOKENS:,} tokens: under {OPEN_MB:g} MB in all"
    if cost is None or (cost.open_episodes, cost.open_tokens) != (OPEN_EPISODES, OPEN_TOKENS):
        yield Aim(wanted)
    else:
        measured = (
            f"{cost.open_hot_mb:.0f} MB hot, {cost.open_rest_mb:.0f} MB at rest ({cost.empty_mb:.0f} MB empty)"
        )
        yield Aim(wanted, measured, max(cost.open_hot_mb, cost.open_rest_mb) < OPEN_MB)
