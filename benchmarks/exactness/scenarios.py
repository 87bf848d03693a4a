"""What the agents do, and what the engine does to them: one small function each.

An episode is tool turns ``k1``, ``k2``, … and a last reply in plain text. The marker in each new message says
which reply of the plan the engine samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from exactness.agent import Agent
from exactness.plan import Fault, Plan, Step

SYSTEM: Final = "You are a careful engineer. You work through the tools that you are offered."
HELPER: Final = "You are a helper. You do one small task with your tools and report what you found."
SPLIT: Final = 0.4
TOOL: Final = Step(calls=("bash",))
LAST: Final = Step()
PACE_S: Final = 0.02
SLOW_PACE_S: Final = 0.01
HANG_UP_S: Final = 0.5
SETTLE_S: Final = 0.5
"""Time for a gateway to notice a hang-up."""
ABANDONED_S: Final = 2.5
"""Time for a call that was hung up on to end, where nobody ends it earlier: its reply may be recorded then."""

Restart = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """``play`` raises CallFailed where the agent gives up. ``what``: its line in the table's legend."""

    name: str
    what: str
    plan: Plan
    play: Callable[[Agent, Restart], Awaitable[None]]


def result(key: str) -> str:
    """A tool's result, which asks the engine for the reply ``key``."""
    return f"ok [[{key}]]\n" + "\n".join(
        f"src/part_{key}_{line}.py:{line * 7}: def handle(self):" for line in range(6)
    )


def tool_turns(count: int) -> dict[str, Step]:
    """Keys ``k1`` … : tool calls, and a last text."""
    return {f"k{at}": TOOL if at < count else LAST for at in range(1, count + 1)}


async def _turns(agent: Agent, keys: str, *, first: bool = True) -> None:
    """Turns for the keys, which are separated by spaces; the first is asked for by a user message."""
    for place, key in enumerate(keys.split()):
        if first and place == 0:
            agent.ask(f"Find what fails. [[{key}]]")
        else:
            agent.answer_calls(result(key))
        await agent.call()


async def _linear(agent: Agent, _: Restart) -> None:
    await _turns(agent, "k1 k2 k3 k4")


async def _second_user_message(agent: Agent, _: Restart) -> None:
    await _turns(agent, "k1 k2")
    agent.ask("And now the other module. [[k3]]")
    await agent.call()
    await _turns(agent, "k4", first=False)


async def _sub_agent(agent: Agent, _: Restart) -> None:
    await _turns(agent, "k1")
    await _turns(agent.beside(HELPER), "s1 s2")
    await _turns(agent, "k2 k3", first=False)


async def _parallel(agent: Agent, _: Restart) -> None:
    await _turns(agent, "k1")
    await asyncio.gather(*(_turns(agent.beside(HELPER), f"{one}1 {one}2") for one in "ab"))
    agent.answer_calls("a is done", result("k2"))
    await agent.call()


async def _retry_middle(agent: Agent, _: Restart) -> None:
    await _turns(agent, "k1")
    agent.answer_calls(result("k2"))
    await agent.call(lose=True)
    await _turns(agent, "k3", first=False)


async def _retry_last(agent: Agent, _: Restart) -> None:
    await _turns(agent, "k1 k2")
    agent.answer_calls(result("k3"))
    await agent.call(lose=True)


async def _hang_up_retry(agent: Agent, _: Restart) -> None:
    await _turns(agent, "k1")
    agent.answer_calls(result("k2"))
    await agent.hang_up(HANG_UP_S)
    await asyncio.sleep(SETTLE_S)
    await agent.retry()
    await _turns(agent, "k3", first=False)
    await asyncio.sleep(ABANDONED_S)


async def _hang_up_stream(agent: Agent, _: Restart) -> None:
    await _turns(agent, "k1 k2")
    agent.answer_calls(result("k3"))
    await agent.hang_up(HANG_UP_S, stream=True)
    await asyncio.sleep(SETTLE_S)
    await agent.stream(attempt=1)
    await asyncio.sleep(ABANDONED_S)


async def _hang_up_last(agent: Agent, _: Restart) -> None:
    await _turns(agent, "k1 k2")
    agent.answer_calls(result("k3"))
    await agent.hang_up(HANG_UP_S)
    await asyncio.sleep(ABANDONED_S)


async def _slow_stream(agent: Agent, _: Restart) -> None:
    await _turns(agent, "k1")
    agent.answer_calls(result("k2"))
    await agent.stream()


async def _kill(agent: Agent, restart: Restart) -> None:
    await _turns(agent, "k1 k2")
    await restart()
    agent.answer_calls(result("k3"))
    await agent.call()


def _plan(count: int, **more: Any) -> Plan:
    return Plan(tool_turns(count), **more)


def _agents_plan() -> Plan:
    helpers = {f"{one}{at}": TOOL if at == 1 else LAST for one in "sab" for at in (1, 2)}
    return Plan({**tool_turns(3), **helpers})


def _two_tasks() -> Plan:
    plan = _agents_plan()
    return Plan({**plan.steps, "k1": Step(calls=("task", "task")), "k2": LAST})


_FAULTS: Final[dict[str, Fault]] = {
    "hang-up": Fault(pace_s=PACE_S),
    "500": Fault(status=500),
    "update": Fault(pace_s=SLOW_PACE_S, update_after=20),
    "slow": Fault(pace_s=SLOW_PACE_S),
}
SCENARIOS: Final = (
    Scenario("tool turns", "three tool turns and a last text; canonical tokens", _plan(4), _linear),
    Scenario(
        "non-canonical tokens",
        f"the same; {SPLIT:.0%} of the tokens are sampled as two, and JSON has no spaces, unlike the template's",
        _plan(4, split=SPLIT, compact=True),
        _linear,
    ),
    Scenario(
        "second user message",
        "a tool turn, a text, a second user message (the template drops older reasoning), a tool turn, a text",
        Plan({"k1": TOOL, "k2": LAST, "k3": TOOL, "k4": LAST}),
        _second_user_message,
    ),
    Scenario(
        "sub-agent", "an agent with its own system prompt plays between two turns", _agents_plan(), _sub_agent
    ),
    Scenario(
        "parallel calls",
        "one reply with two calls, for which two sub-agents play at once",
        _two_tasks(),
        _parallel,
    ),
    Scenario(
        "retry, middle call",
        "the second reply is lost behind the gateway and asked for again",
        _plan(3),
        _retry_middle,
    ),
    Scenario("retry, last call", "the last reply is lost likewise and asked for again", _plan(3), _retry_last),
    Scenario(
        "hang-up, retry",
        f"the agent hangs up {HANG_UP_S:g} s into its second call, and retries it",
        _plan(3, faults={"k2": _FAULTS["hang-up"]}),
        _hang_up_retry,
    ),
    Scenario(
        "hang-up in a stream",
        "the same with the last call, which is a stream of which the agent has read a part",
        _plan(3, faults={"k3": _FAULTS["hang-up"]}),
        _hang_up_stream,
    ),
    Scenario(
        "hang-up, last call",
        f"the agent hangs up {HANG_UP_S:g} s into its last call and is gone",
        _plan(3, faults={"k3": _FAULTS["hang-up"]}),
        _hang_up_last,
    ),
    Scenario(
        "engine 500",
        "the engine answers the second call with 500, once",
        _plan(4, faults={"k2": _FAULTS["500"]}),
        _linear,
    ),
    Scenario(
        "weight update",
        "the weights change at token 20 of the second call",
        _plan(4, faults={"k2": _FAULTS["update"]}),
        _linear,
    ),
    Scenario(
        "slow stream",
        f"the last call is streamed, at {1 / SLOW_PACE_S:.0f} tokens/s",
        Plan({"k1": TOOL, "k2": Step(words=160, thought=40)}, {"k2": _FAULTS["slow"]}),
        _slow_stream,
    ),
    Scenario("kill -9", "the gateway is killed after the second reply and started again", _plan(3), _kill),
)
