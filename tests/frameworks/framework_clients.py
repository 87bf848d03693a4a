"""The smallest client of each framework, in each mode that it has: run in the Python that has the frameworks.

    python framework_clients.py NAME

Prints ``{"modes", "version"}`` of the framework NAME. Then it reads lines ``{"mode", "url", "key"}``, plays the
mode's conversation with the OpenAI-compatible server at ``url``, and prints a line for each:
``{"error", "refusals"}``, the error that the framework raised or null, and the messages of the server's refusals.
A framework's part imports it, so that the others need not be there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel

MODEL = "policy"
QUESTION = "How warm is it in Paris? Use the tool, then answer."
Play = Callable[[str, str], Any]
"""A conversation with the server at a base URL, by a key."""


class Answer(BaseModel):
    """The warmth of a city."""

    city: str
    degrees: int


def weather(city: str) -> str:
    """Tells how warm it is in a city.

    Args:
        city: Name of the city.
    """
    return f"It is 21 degrees in {city}."


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells how warm it is in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def wants(condition: object, what: str) -> None:
    """Raises where the framework did not give what the mode is for."""
    if not condition:
        raise AssertionError(f"the client got no {what}")


def openai_sdk() -> dict[str, Play]:
    from openai import OpenAI

    def ask(url: str, key: str, **fields: Any) -> Any:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        return OpenAI(base_url=url, api_key=key).chat.completions.create(model=MODEL, messages=messages, **fields)

    def stream(url: str, key: str) -> None:
        parts = [chunk.choices[0].delta.content for chunk in ask(url, key, stream=True) if chunk.choices]
        wants("".join(part or "" for part in parts), "text")

    def call(choice: Any, count: int = 1, **fields: Any) -> Play:
        def play(url: str, key: str) -> None:
            message = ask(url, key, tools=[WEATHER], tool_choice=choice, **fields).choices[0].message
            wants(len(message.tool_calls or ()) == count, "tool call")

        return play

    def schema(url: str, key: str) -> None:
        client = OpenAI(base_url=url, api_key=key)
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        done = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Answer)
        wants(done.choices[0].message.parsed, "answer")

    return {
        "chat": lambda url, key: wants(ask(url, key).choices[0].message.content, "text"),
        "stream": stream,
        "tools": call("auto"),
        "parallel": call("auto", 2, parallel_tool_calls=True),
        "required": call("required"),
        "named": call({"type": "function", "function": {"name": "weather"}}),
        "schema": schema,
    }


def langchain() -> dict[str, Play]:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    def model(url: str, key: str) -> Any:
        return ChatOpenAI(model=MODEL, base_url=url, api_key=key)

    def call(count: int = 1, **fields: Any) -> Play:
        def play(url: str, key: str) -> None:
            bound = model(url, key).bind_tools([tool(weather)], **fields)
            wants(len(bound.invoke(QUESTION).tool_calls) == count, "tool call")

        return play

    def structured(method: str) -> Play:
        def play(url: str, key: str) -> None:
            wants(model(url, key).with_structured_output(Answer, method=method).invoke(QUESTION), "answer")

        return play

    return {
        "chat": lambda url, key: wants(model(url, key).invoke(QUESTION).content, "text"),
        "stream": lambda url, key: wants("".join(part.text for part in model(url, key).stream(QUESTION)), "text"),
        "tools": call(),
        "parallel": call(2, parallel_tool_calls=True),
        "required": call(tool_choice="any"),
        "named": call(tool_choice="weather"),
        "schema": structured("json_schema"),
        "schema by tool": structured("function_calling"),
    }


def langgraph() -> dict[str, Play]:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    def agent(url: str, key: str, **fields: Any) -> Any:
        tools = fields.pop("tools", [tool(weather)])
        return create_react_agent(ChatOpenAI(model=MODEL, base_url=url, api_key=key), tools, **fields)

    asked: Any = {"messages": [("user", QUESTION)]}
    return {
        "chat": lambda url, key: wants(agent(url, key, tools=[]).invoke(asked)["messages"][-1].content, "text"),
        "stream": lambda url, key: wants(
            list(agent(url, key, tools=[]).stream(asked, stream_mode="messages")), "text"
        ),
        "tools": lambda url, key: wants(len(agent(url, key).invoke(asked)["messages"]) == 4, "tool call"),
        "parallel": lambda url, key: wants(len(agent(url, key).invoke(asked)["messages"]) == 5, "tool calls"),
        "schema": lambda url, key: wants(
            agent(url, key, response_format=Answer, tools=[]).invoke(asked)["structured_response"], "answer"
        ),
    }


def pydantic_ai() -> dict[str, Play]:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def agent(url: str, key: str, **fields: Any) -> Any:
        return Agent(OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key=key)), **fields)

    def run(**fields: Any) -> Play:
        return lambda url, key: wants(agent(url, key, **fields).run_sync(QUESTION).output, "output")

    async def stream(url: str, key: str) -> None:
        async with agent(url, key).run_stream(QUESTION) as result:
            wants("".join([part async for part in result.stream_text(delta=True)]), "text")

    return {
        "chat": run(),
        "stream": stream,
        "tools": run(tools=[weather]),
        "parallel": run(tools=[weather]),
        "schema": run(output_type=NativeOutput(Answer)),
        "schema by tool": run(output_type=ToolOutput(Answer)),
    }


def openai_agents() -> dict[str, Play]:
    from openai import AsyncOpenAI

    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    def agent(url: str, key: str, **fields: Any) -> Any:
        model = OpenAIResponsesModel(MODEL, AsyncOpenAI(base_url=url, api_key=key))
        return Agent(name="agent", model=model, **fields)

    def run(**fields: Any) -> Play:
        async def play(url: str, key: str) -> None:
            wants((await Runner.run(agent(url, key, **fields), QUESTION)).final_output, "output")

        return play

    def called(choice: str, **fields: Any) -> Play:
        settings = ModelSettings(tool_choice=choice, **fields)
        return run(tools=[function_tool(weather)], model_settings=settings)

    async def stream(url: str, key: str) -> None:
        result = Runner.run_streamed(agent(url, key), QUESTION)
        wants([event async for event in result.stream_events()], "event")

    return {
        "chat": run(),
        "stream": stream,
        "tools": called("auto"),
        "parallel": called("auto", parallel_tool_calls=True),
        "required": called("required"),
        "named": called("weather"),
        "schema": run(output_type=Answer),
    }


def autogen() -> dict[str, Play]:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import ModelFamily, UserMessage
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "family": ModelFamily.UNKNOWN,
    }
    asked = [UserMessage(content=QUESTION, source="user")]

    def model(url: str, key: str, **fields: Any) -> Any:
        return OpenAIChatCompletionClient(model=MODEL, base_url=url, api_key=key, model_info=info, **fields)

    def run(**fields: Any) -> Play:
        async def play(url: str, key: str) -> None:
            done = await AssistantAgent("agent", model(url, key), **fields).run(task=QUESTION)
            wants(done.messages[-1].to_text(), "output")

        return play

    def call(choice: Any) -> Play:
        async def play(url: str, key: str) -> None:
            tool = FunctionTool(weather, "Tells how warm it is in a city.")
            given = tool if choice == "weather" else choice
            done = await model(url, key).create(asked, tools=[tool], tool_choice=given)
            wants(isinstance(done.content, list), "tool call")

        return play

    async def stream(url: str, key: str) -> None:
        wants([part async for part in model(url, key).create_stream(asked)], "text")

    return {
        "chat": run(),
        "stream": stream,
        "tools": run(tools=[weather]),
        "parallel": run(tools=[weather]),
        "required": call("required"),
        "named": call("weather"),
        "schema": run(output_content_type=Answer),
    }


def smolagents() -> dict[str, Play]:
    from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

    def model(url: str, key: str) -> Any:
        return OpenAIServerModel(MODEL, api_base=url, api_key=key)

    asked: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]

    def agent(**fields: Any) -> Play:
        def play(url: str, key: str) -> None:
            made = ToolCallingAgent([tool(weather)], model(url, key), max_steps=3, verbosity_level=0, **fields)
            wants(made.run(QUESTION), "answer")
            wants(made.memory.steps[-1].is_final_answer, "final answer")

        return play

    def structured(url: str, key: str) -> None:
        made = CodeAgent(
            [], model(url, key), max_steps=2, verbosity_level=0, use_structured_outputs_internally=True
        )
        wants(made.run(QUESTION), "answer")
        wants(made.memory.steps[-1].is_final_answer, "final answer")

    return {
        "chat": lambda url, key: wants(model(url, key).generate(asked).content, "text"),
        "stream": lambda url, key: wants(list(model(url, key).generate_stream(asked)), "text"),
        "required": agent(),
        "parallel": agent(),
        "schema": structured,
    }


def dspy() -> dict[str, Play]:
    import dspy as library

    library.configure_cache(enable_disk_cache=False, enable_memory_cache=False)

    def predict(make: Callable[[], Any], adapter: Any) -> Play:
        def play(url: str, key: str) -> None:
            model = library.LM(f"openai/{MODEL}", api_base=url, api_key=key, cache=False, num_retries=0)
            with library.context(lm=model, adapter=adapter()):
                wants(make()(question=QUESTION).answer, "answer")

        return play

    class Typed(library.Signature):
        question: str = library.InputField()
        answer: Answer = library.OutputField()

    return {
        "chat": predict(lambda: library.Predict("question -> answer"), library.ChatAdapter),
        "tools": predict(
            lambda: library.ReAct("question -> answer", tools=[weather], max_iters=2), library.ChatAdapter
        ),
        "schema": predict(lambda: library.Predict(Typed), library.JSONAdapter),
    }


def agno() -> dict[str, Play]:
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike

    def agent(url: str, key: str, **fields: Any) -> Any:
        return Agent(model=OpenAILike(id=MODEL, base_url=url, api_key=key), telemetry=False, **fields)

    def run(**fields: Any) -> Play:
        def play(url: str, key: str) -> None:
            done = agent(url, key, **fields).run(QUESTION)
            wants(getattr(done.status, "value", done.status) != "ERROR", f"answer: {done.content}")
            wants(done.content, "answer")

        return play

    def called(choice: Any) -> Play:
        return run(tools=[weather], tool_choice=choice, tool_call_limit=1)

    return {
        "chat": run(),
        "stream": lambda url, key: wants(list(agent(url, key).run(QUESTION, stream=True)), "event"),
        "tools": run(tools=[weather]),
        "parallel": run(tools=[weather]),
        "required": called("required"),
        "named": called({"type": "function", "function": {"name": "weather"}}),
        "schema": run(output_schema=Answer, structured_outputs=True),
    }


def llama_index() -> dict[str, Play]:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    asked = [ChatMessage(role="user", content=QUESTION)]

    def model(url: str, key: str, **fields: Any) -> Any:
        return OpenAILike(
            model=MODEL,
            api_base=url,
            api_key=key,
            is_chat_model=True,
            is_function_calling_model=True,
            context_window=8192,
            **fields,
        )

    async def agent(url: str, key: str) -> None:
        made = FunctionAgent(tools=[FunctionTool.from_defaults(weather)], llm=model(url, key), streaming=False)
        wants(str(await made.run(QUESTION)), "answer")

    def call(**fields: Any) -> Play:
        def play(url: str, key: str) -> None:
            tool = FunctionTool.from_defaults(weather)
            llm = model(url, key)
            wants(llm.get_tool_calls_from_response(llm.chat_with_tools([tool], QUESTION, **fields)), "tool call")

        return play

    def structured(**fields: Any) -> Play:
        return lambda url, key: wants(
            model(url, key, **fields).as_structured_llm(Answer).chat(asked).raw, "answer"
        )

    return {
        "chat": lambda url, key: wants(model(url, key).chat(asked).message.content, "text"),
        "stream": lambda url, key: wants([part.delta for part in model(url, key).stream_chat(asked)], "text"),
        "tools": agent,
        "parallel": call(allow_parallel_tool_calls=True),
        "required": call(tool_required=True),
        "named": call(tool_choice="weather"),
        "schema": structured(should_use_structured_outputs=True),
        "schema by tool": structured(),
    }


def instructor() -> dict[str, Play]:
    import instructor as library
    from openai import OpenAI

    def create(mode: Any, stream: bool = False) -> Play:
        def play(url: str, key: str) -> None:
            client = library.from_openai(OpenAI(base_url=url, api_key=key), mode=mode)
            messages: list[Any] = [{"role": "user", "content": QUESTION}]
            given: Any = {"model": MODEL, "messages": messages, "response_model": Answer, "max_retries": 0}
            wants(list(client.create_partial(**given)) if stream else client.create(**given), "answer")

        return play

    return {
        "stream": create(library.Mode.TOOLS, stream=True),
        "named": create(library.Mode.TOOLS),
        "schema": create(library.Mode.JSON_SCHEMA),
        "schema by tool": create(library.Mode.TOOLS),
    }


def haystack() -> dict[str, Play]:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    asked = [ChatMessage.from_user(QUESTION)]

    def model(url: str, key: str, **fields: Any) -> Any:
        return OpenAIChatGenerator(api_key=Secret.from_token(key), model=MODEL, api_base_url=url, **fields)

    def run(**fields: Any) -> Play:
        return lambda url, key: wants(model(url, key, **fields).run(asked)["replies"][0].text, "text")

    def call(**asked_for: Any) -> Play:
        def play(url: str, key: str) -> None:
            made = model(url, key, tools=[create_tool_from_function(weather)], generation_kwargs=asked_for)
            wants(made.run(asked)["replies"][0].tool_calls, "tool call")

        return play

    def agent(url: str, key: str) -> None:
        made = Agent(chat_generator=model(url, key), tools=[create_tool_from_function(weather)])
        wants(made.run(asked)["last_message"].text, "text")

    return {
        "chat": run(),
        "stream": run(streaming_callback=lambda chunk: None),
        "tools": agent,
        "parallel": call(parallel_tool_calls=True),
        "required": call(tool_choice="required"),
        "named": call(tool_choice={"type": "function", "function": {"name": "weather"}}),
        "schema": run(generation_kwargs={"response_format": Answer}),
    }


def crewai() -> dict[str, Play]:
    os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}
    from crewai import LLM, Agent, Crew, Task
    from crewai.tools import tool

    def model(url: str, key: str, **fields: Any) -> Any:
        return LLM(model=f"openai/{MODEL}", base_url=url, api_key=key, **fields)

    def crew(tools: Any = (), **fields: Any) -> Play:
        def play(url: str, key: str) -> None:
            who = {"role": "forecaster", "goal": "Answer.", "backstory": "You answer.", "tools": list(tools)}
            agent = Agent(llm=model(url, key), max_iter=3, **who)
            task = Task(description=QUESTION, expected_output="An answer.", agent=agent, **fields)
            done = Crew(agents=[agent], tasks=[task]).kickoff()
            wants(done.pydantic if fields else done.raw, "answer")

        return play

    return {
        "chat": crew(),
        "stream": lambda url, key: wants(model(url, key, stream=True).call(QUESTION), "text"),
        "tools": crew([tool("weather")(weather)]),
        "schema": crew(output_pydantic=Answer),
    }


FRAMEWORKS: dict[str, tuple[str, Callable[[], dict[str, Play]]]] = {
    "openai": ("openai", openai_sdk),
    "LangChain": ("langchain-openai", langchain),
    "LangGraph": ("langgraph", langgraph),
    "pydantic-ai": ("pydantic-ai-slim", pydantic_ai),
    "OpenAI Agents SDK": ("openai-agents", openai_agents),
    "AutoGen": ("autogen-agentchat", autogen),
    "smolagents": ("smolagents", smolagents),
    "DSPy": ("dspy", dspy),
    "Agno": ("agno", agno),
    "LlamaIndex": ("llama-index-core", llama_index),
    "Instructor": ("instructor", instructor),
    "Haystack": ("haystack-ai", haystack),
    "CrewAI": ("crewai", crewai),
}
"""Name of its distribution, and its modes, by the framework's name."""


REFUSALS: list[str] = []
"""Messages of the replies above 400 since the mode began."""


def note_refusals() -> None:
    """Has every client of httpx, which all frameworks have below them, note the server's refusals."""
    import httpx

    ask, ask_async = httpx.Client.send, httpx.AsyncClient.send

    def send(self: httpx.Client, *args: Any, **kwargs: Any) -> httpx.Response:
        response = ask(self, *args, **kwargs)
        if response.is_error:
            response.read()
            REFUSALS.append(response.json()["error"]["message"])
        return response

    async def send_async(self: httpx.AsyncClient, *args: Any, **kwargs: Any) -> httpx.Response:
        response = await ask_async(self, *args, **kwargs)
        if response.is_error:
            await response.aread()
            REFUSALS.append(response.json()["error"]["message"])
        return response

    httpx.Client.send = send  # type: ignore[method-assign]
    httpx.AsyncClient.send = send_async  # type: ignore[method-assign]


def played(play: Play, url: str, key: str) -> str | None:
    """The error of the framework; None where the client got what the mode is for."""
    try:
        done = play(url, key)
        if asyncio.iscoroutine(done):
            asyncio.run(done)
    except Exception as error:  # noqa: BLE001 - a framework may raise anything, which is then the finding
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    warnings.simplefilter("ignore")
    note_refusals()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # frameworks print to standard output
    distribution, make = FRAMEWORKS[sys.argv[1]]
    with contextlib.redirect_stdout(sys.stderr):
        modes = make()
        print(json.dumps({"modes": list(modes), "version": version(distribution)}), file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            REFUSALS.clear()
            error = played(modes[asked["mode"]], asked["url"], asked["key"])
            print(json.dumps({"error": error, "refusals": REFUSALS}), file=answers, flush=True)


if __name__ == "__main__":
    main()
