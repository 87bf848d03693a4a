"""A scripted agent that writes down what it got. Standard library only; runs in sandboxes and outside.

    MODEL_URL=… EPISODE_KEY=… [TOOL_URL=…] python3 player.py PLAN [LOG]

PLAN is a file whose first ``{`` begins an object: ``{"seed", "dialect", "steps", "misdeeds", "pause_s"}``. All
that the agent does follows from the seed: several conversations (main, sub-agents, compactions), streamed calls
and unstreamed ones, edited histories, retries as SDKs make them, two equal requests at once. ``misdeeds`` is the
share of calls that it spoils: it hangs up before a reply or in the middle of it, sends half a body, sends or reads
slowly.

Its log is one JSON object per line, in LOG (synced line by line) or on standard output. ``got`` is a reply that
arrived whole, with its terminal event. Each prompt ends with receipts ``(got MARK SHA)`` of the replies that came
before it, because the log of an agent that is killed in its sandbox is lost.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import random
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from wires import DIALECTS, Conversation, Cut, Failed

MARK = re.compile(r"\[n:([0-9a-f]{12})\]")
RETRIED = (408, 409, 429, 500, 502, 503, 504)
GONE = (401, 404, 410)
ATTEMPTS = 6
SILENCE_S = 60.0
MISDEEDS = ("hang_up_at_once", "hang_up_in_reply", "half_a_body", "slow_body", "slow_reader", "twice")
WORDS = ("look", "at", "the", "log", "again", "and", "write", "a", "short", "note", "about", "last", "command")


class HungUp(Exception):
    """The agent itself closed the connection."""


class OverWithIt(Exception):
    """The episode takes no more calls."""


class Log:
    def __init__(self, path: str | None) -> None:
        self._lock = threading.Lock()
        self._file = None if path is None else open(path, "ab", buffering=0)  # noqa: SIM115 - open to the end

    def __call__(self, event: str, **fields: Any) -> None:
        line = json.dumps(dict(fields, ev=event)).encode() + b"\n"
        with self._lock:
            if self._file is None:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            else:
                self._file.write(line)
                os.fdatasync(self._file.fileno())


class Player:
    def __init__(self, plan: dict[str, Any], log: Log) -> None:
        self.log = log
        self.url = urlsplit(os.environ["MODEL_URL"])
        self.key = os.environ["EPISODE_KEY"]
        self.plan = plan
        self.random = random.Random(plan["seed"])
        self.number = 0
        self.receipts: list[str] = []
        self.replies = ["nothing yet"]

    def conversation(self, kind: str) -> Conversation:
        system = f"You are the {kind} agent of plan {self.plan['seed']}."
        return DIALECTS[self.plan["dialect"]](system, self.random.choice((8, 400, 400, 400)))

    def play(self) -> None:
        main = current = self.conversation("main")
        for _ in range(self.plan["steps"]):
            chance = self.random.random()
            if chance < 0.08:
                current = self.conversation("sub")
            elif chance < 0.14:
                main = current = self.conversation("main")
                current.say("Summary of what was done: " + self.replies[-1])
            elif chance < 0.25:
                current = main
            elif chance < 0.33 and len(current.messages) > 4:
                current.forget_reply(2)
            self.step(current)
            time.sleep(self.random.random() * self.plan["pause_s"])

    def step(self, conversation: Conversation) -> None:
        self.number += 1
        text = " ".join(self.random.choices(WORDS, k=self.random.randint(3, 60)))
        receipts = self.receipts[-8:]
        conversation.say(" ".join([text, *receipts]))
        stream = self.random.random() < 0.6
        body = json.dumps(conversation.body(stream)).encode()
        misdeed = self.random.choice(MISDEEDS) if self.random.random() < self.plan["misdeeds"] else ""
        reply = self.ask(conversation, body, stream, misdeed)
        said = conversation.read(reply)
        self.replies.append(said)
        self.receipts = [each for each in self.receipts if each not in receipts] + [self.receipt(said)]

    def receipt(self, text: str) -> str:
        found = MARK.search(text)
        return f"(got {found.group(1) if found else '0' * 12} {digest(text)})"

    def ask(self, conversation: Conversation, body: bytes, stream: bool, misdeed: str) -> dict[str, Any]:
        """The reply, after as many attempts as it takes. Raises OverWithIt."""
        marked = self.plan["dialect"] != "gemini"
        for attempt in range(ATTEMPTS):
            headers = {"x-stainless-retry-count": str(attempt)} if marked else {}
            if misdeed == "twice":
                headers["idempotency-key"] = f"twice-{self.plan['seed']}-{self.number}"
            try:
                self.log("ask", n=self.number, attempt=attempt, misdeed=misdeed, stream=stream)
                if misdeed == "twice":
                    reply = self.twice(conversation, body, stream, headers)
                else:
                    reply = self.once(conversation, body, stream, headers, misdeed, attempt)
                return reply
            except HungUp:
                self.log("misdeed", n=self.number, kind=misdeed)
                misdeed = ""
                if self.random.random() < 0.5:
                    time.sleep(0.05)
            except (OSError, http.client.HTTPException, ValueError, LookupError, Cut, Failed) as error:
                self.log("miss", n=self.number, why=f"{type(error).__name__}: {error}"[:200])
                time.sleep(min(2.0, 0.1 * 2**attempt))
        raise OverWithIt("no attempt came through")

    def twice(
        self, conversation: Conversation, body: bytes, stream: bool, headers: dict[str, str]
    ) -> dict[str, Any]:
        """Two equal requests at once with one idempotency key, as a proxy that repeats a request makes them."""
        replies: list[dict[str, Any]] = []
        errors: list[Exception] = []

        def send() -> None:
            try:
                replies.append(self.once(conversation, body, stream, headers, "", 0))
            except Exception as error:  # noqa: BLE001 - raised again below
                errors.append(error)

        threads = [threading.Thread(target=send) for _ in range(2)]
        for thread in threads:
            thread.start()
            time.sleep(0.01)
        for thread in threads:
            thread.join()
        marks = [mark for reply in replies for mark in MARK.findall(json.dumps(reply))[:1]]
        self.log("twice", n=self.number, marks=marks)
        if not replies:
            raise errors[0]
        return replies[0]

    def once(
        self,
        conversation: Conversation,
        body: bytes,
        stream: bool,
        headers: dict[str, str],
        misdeed: str,
        attempt: int,
    ) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self.url.hostname or "", self.url.port, timeout=SILENCE_S)
        try:
            connection.connect()
            port = connection.sock.getsockname()[1] if connection.sock.family == socket.AF_INET else 0
            self.send(connection, conversation.path(stream), body, headers, misdeed)
            if misdeed == "hang_up_at_once":
                time.sleep(self.random.random() * 0.1)
                self.reset(connection)
            response = connection.getresponse()
            if response.status != 200:
                self.refused(response)
            if stream:
                reply = conversation.gather(self.events(connection, response, misdeed))
            else:
                reply = dict(json.loads(response.read()))
            text = type(conversation)("", 1).read(reply)
            mark = MARK.search(text)
            self.log(
                "got",
                n=self.number,
                mark=mark.group(1) if mark else None,
                sha=digest(text),
                stream=stream,
                attempt=attempt,
                port=port,
            )
            return reply
        finally:
            connection.close()

    def send(
        self, connection: http.client.HTTPConnection, path: str, body: bytes, headers: dict[str, str], misdeed: str
    ) -> None:
        connection.putrequest("POST", self.url.path + path)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(len(body)))
        connection.putheader("authorization", "Bearer " + self.key)
        connection.endheaders()
        if misdeed == "half_a_body":
            connection.send(body[: len(body) // 2])
            time.sleep(self.random.random() * 0.2)
            self.reset(connection)
        if misdeed == "slow_body":
            for start in range(0, len(body), len(body) // 5 + 1):
                connection.send(body[start : start + len(body) // 5 + 1])
                time.sleep(0.1)
            self.log("misdeed", n=self.number, kind=misdeed)
            return
        connection.send(body)

    def refused(self, response: http.client.HTTPResponse) -> None:
        answer = response.read(2000).decode("utf-8", "replace")
        self.log("refused", n=self.number, status=response.status, why=answer[:300])
        retry = response.headers.get("x-should-retry") != "false"
        if response.status in GONE or response.status not in RETRIED or not retry:
            raise OverWithIt(str(response.status))
        raise ValueError(f"refused: {response.status}")

    def events(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, misdeed: str
    ) -> Iterator[dict[str, Any]]:
        seen = 0
        last = self.random.randint(1, 12)
        for line in response:
            if misdeed == "slow_reader":
                time.sleep(0.03)
            if line.startswith(b"data:"):
                data = line[5:].strip()
                yield {"done": True} if data == b"[DONE]" else json.loads(data)
                seen += 1
                if misdeed == "hang_up_in_reply" and seen == last:
                    self.reset(connection)

    def reset(self, connection: http.client.HTTPConnection) -> None:
        """Ends the connection at once, with a reset where there is TCP. Raises HungUp."""
        if connection.sock is not None:
            if connection.sock.family == socket.AF_INET:
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sock.close()
        raise HungUp

    def use_tool(self) -> None:
        """One command through the MCP endpoint, whose output is known."""
        word = f"t{self.random.randrange(1 << 40):x}"
        params = {"name": "bash", "arguments": {"command": f"sleep 0.{self.random.randint(0, 4)}; echo {word}"}}
        try:
            session = self.rpc(
                0,
                "initialize",
                {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {},
                    "clientInfo": {"name": "player", "version": "1"},
                },
                {},
            )[1]
            result = self.rpc(1, "tools/call", params, session)[0]
            said = "".join(part.get("text", "") for part in result.get("content", ()))
            self.log("tool", word=word, ok=word in said, failed=bool(result.get("isError")), said=said[:200])
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            self.log("miss", n=self.number, why=f"tool: {type(error).__name__}: {error}"[:200])

    def rpc(self, number: int, method: str, params: dict[str, Any], session: dict[str, str]) -> Any:
        url = urlsplit(os.environ["TOOL_URL"])
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=SILENCE_S)
        headers = {
            "content-type": "application/json",
            "accept": "application/json, text/event-stream",
            "authorization": "Bearer " + self.key,
            **session,
        }
        try:
            message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            connection.request("POST", url.path, json.dumps(message), headers)
            response = connection.getresponse()
            text = response.read().decode()
            named = response.headers.get("mcp-session-id")
            for line in [text, *(line[5:] for line in text.splitlines() if line.startswith("data:"))]:
                if line.strip().startswith("{") and json.loads(line).get("id") == number:
                    return json.loads(line)["result"], {"mcp-session-id": named} if named else session
            raise ValueError(f"no answer: {response.status} {text[:100]}")
        finally:
            connection.close()


def digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode("utf-8", "replace")).hexdigest()[:8]


def main() -> int:
    with open(sys.argv[1], encoding="utf-8") as file:
        text = file.read()
    plan = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]
    log = Log(sys.argv[2] if len(sys.argv) > 2 else None)
    log("begun", pid=os.getpid())
    player = Player(plan, log)
    try:
        if os.environ.get("TOOL_URL"):
            player.use_tool()
        player.play()
        if os.environ.get("TOOL_URL"):
            player.use_tool()
    except OverWithIt as why:
        log("over", why=str(why))
        return 0
    log("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
