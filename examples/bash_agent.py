"""A coding agent in about a page: the official `openai` package, one tool (bash), a loop.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… python examples/bash_agent.py "Fix the failing test." --repo DIR [--stream]

It runs what the model says, in DIR and with your rights: give it a copy of a repository, in a sandbox if the
model is any good. It prints one line of JSON per turn and its exit code says how it ended (see `Ending`).

It stops when the model answers without calling the tool. A model that has not been trained to call tools would
stop at once; `--min-turns N` keeps it going: until turn N the agent answers such a reply with a user message
that carries the output of a look around of its own choice (`LOOKS`), really run in DIR.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessage

SYSTEM = "You are a software engineer. Work in the git repository in the current directory with the bash tool."
BASH: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command with bash in the repository. Returns its output and its exit status.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command to run."}},
            "required": ["command"],
        },
    },
}
LOOKS = (
    "git log --oneline",
    "git ls-files",
    "cat README.md",
    "git grep -n 'def ' -- '*.py'",
    "git status --short",
)


class Ending(enum.IntEnum):
    """Exit codes. 1 and 2 are Python's own: a crash, a wrong command line."""

    FINISHED = 0
    """The model answered without calling the tool."""
    REFUSED = 3
    """The API refused the call for good: context full, budget spent, episode over, bad key."""
    API_FAILED = 4
    """The API kept failing although the call was retried."""
    MAX_TURNS = 5


def run_bash(command: str, repo: Path, timeout_s: float, max_chars: int) -> str:
    """Run ``command``. Returns the text for the model: the output, cut in the middle, and the exit status.

    The output goes to a file, not to a pipe, so that a process left in the background cannot hold the agent;
    the file cannot outgrow 64 MiB, and the whole process group is killed in the end.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            ["bash", "-c", f"ulimit -f 65536\n{command}"],
            cwd=repo,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = f"exit status {process.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            status = f"killed after {timeout_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # the whole group may have ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    if len(text) > max_chars:
        half = max_chars // 2
        text = f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
    return f"{text.rstrip()}\n[{status}]".lstrip()


def ask(client: openai.OpenAI, model: str, messages: list[Any], stream: bool) -> dict[str, Any]:
    """One model call. Returns the reply as the message to append to the history. Raises openai.APIError."""
    if stream:
        with client.chat.completions.stream(model=model, messages=messages, tools=[BASH]) as events:
            for _ in events:
                pass  # an interactive agent would show the text as it comes
            message: ChatCompletionMessage = events.current_completion_snapshot.choices[0].message
    else:
        message = client.chat.completions.create(model=model, messages=messages, tools=[BASH]).choices[0].message
    reply: dict[str, Any] = {"role": "assistant", "content": message.content}
    reasoning = (message.model_extra or {}).get("reasoning_content")
    if reasoning:
        reply["reasoning_content"] = reasoning
    if message.tool_calls:
        reply["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
            if call.type == "function"
        ]
    return reply


def ask_again_if_cut(client: openai.OpenAI, model: str, messages: list[Any], stream: bool) -> dict[str, Any]:
    """``ask``, with two more tries where the SDK has none: an error in the middle of a stream."""
    for attempt in itertools.count(1):
        try:
            return ask(client, model, messages, stream)
        except openai.APIStatusError:
            raise  # the SDK has already retried what is worth it
        except openai.APIError:
            if attempt == 3 or not stream:
                raise
    raise AssertionError("unreachable")


def answer_call(call: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """The tool message for one call of the model; a call that cannot be run is answered with what is wrong."""
    try:
        command = json.loads(call["function"]["arguments"])["command"]
        if call["function"]["name"] != "bash" or not isinstance(command, str):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        content = 'Error: the only tool is bash, with the arguments {"command": "…"}.'
    else:
        content = run_bash(command, arguments.repo, arguments.timeout, arguments.max_output)
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def run(client: openai.OpenAI, arguments: argparse.Namespace) -> Ending:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": arguments.task}]
    for turn in range(1, arguments.max_turns + 1):
        reply = ask_again_if_cut(client, arguments.model, messages, arguments.stream)
        messages.append(reply)
        calls = reply.get("tool_calls", [])
        print(
            json.dumps({"turn": turn, "characters": len(reply["content"] or ""), "calls": len(calls)}), flush=True
        )
        if calls:
            messages += [answer_call(call, arguments) for call in calls]
        elif turn < arguments.min_turns:
            look = LOOKS[(turn - 1) % len(LOOKS)]
            seen = run_bash(look, arguments.repo, arguments.timeout, arguments.max_output)
            messages.append({"role": "user", "content": f"Go on. Use the bash tool. I ran `{look}`:\n{seen}"})
        else:
            return Ending.FINISHED
    return Ending.MAX_TURNS


def main() -> Ending:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task")
    parser.add_argument("--repo", type=Path, default=Path.cwd(), help="the repository to work in")
    parser.add_argument("--model", default=os.environ.get("OPENAI_MODEL", "default"))
    parser.add_argument("--stream", action="store_true", help="use streamed calls")
    parser.add_argument("--min-turns", type=int, default=1, help="keep the model going until this turn")
    parser.add_argument("--max-turns", type=int, default=50)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one command")
    parser.add_argument("--max-output", type=int, default=8000, help="characters of output the model is shown")
    arguments = parser.parse_args()
    try:
        with openai.OpenAI() as client:
            return run(client, arguments)
    except (openai.RateLimitError, openai.InternalServerError, openai.APIConnectionError) as error:
        ending, reason = Ending.API_FAILED, error.message
    except openai.APIStatusError as error:
        ending, reason = Ending.REFUSED, error.message
    except openai.APIError as error:
        ending, reason = Ending.API_FAILED, error.message
    print(json.dumps({"ending": ending.name.lower(), "message": reason}), flush=True)
    return ending


if __name__ == "__main__":
    sys.exit(main())
