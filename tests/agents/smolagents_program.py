"""A run of smolagents' ToolCallingAgent against an episode's model API; runs in an environment of its own."""

from __future__ import annotations

import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def look(place: str, depth: int = 1) -> str:
    """Looks somewhere.

    Args:
        place: Where to look.
        depth: How far.
    """
    return f'{place}: nothing at depth {depth}, "only" [dust] and {{air}}'


def main(url: str, key: str) -> None:
    model = OpenAIModel(model_id="m", api_base=url, api_key=key, client_kwargs={"max_retries": 0})
    agent = ToolCallingAgent(tools=[look], model=model, max_steps=8, verbosity_level=0)
    sys.stdout.write(str(agent.run("Look around, then answer.")))


if __name__ == "__main__":
    main(*sys.argv[1:])
