"""Calls to the other side, and from it: the conversation of two processes, the same on both sides.

A request names an operation and has encoded arguments; its answer has the result or the exception, and what became
of the mutable containers among the arguments, which are then changed here, too. While a thread waits for its
answer it serves the requests that the other side makes for it (calls back), to any depth that ``MAX_DEPTH``
allows. Each thread talks with one thread of the other side (``mailboxes``).

What must hold: a request has one answer; one thread's conversation is never another's; when the connection breaks,
everything that waits raises BoundaryError, and everything after it too.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from .changes import copies, same, snapshot
from .exports import Exports, Rules
from .failures import Failures
from .guard import in_event_loop, without_meaning
from .imports import Imports
from .mailboxes import Mailboxes
from .proxies import BoundaryError
from .proxy_operators import ProxyOperators
from .service import Service
from .wire import Channel, Decoder, Encoder, WireError

MAX_DEPTH = 40
"""Calls within calls back within calls."""
_A_WHILE_S = 0.005
_TURNS = 3
"""Turns of an event loop after a wait, which held it up: its timers are found to be due, what waits for one wakes,
and what was too late is cancelled."""


class Peer:
    """One side. ``name``: the other side, in a sentence."""

    def __init__(self, channel: Channel, rules: Rules, name: str) -> None:
        self.rules = rules
        self.exports = Exports(self, rules)
        self.imports = Imports(self, rules, self.exports)
        self.failures = Failures()
        self.service = Service(self)
        self.operators = ProxyOperators(self, rules.strict, name)
        self.lost: str | None = None
        self.refused: BoundaryError | None = None
        """Raised again when the work's call returns, so that the work cannot catch it."""
        self.before_asking: Callable[[], None] | None = None
        """Called before each operation that is not part of another."""
        self.keeps_arguments = False
        """What a call made of its arguments is seen in the value that it gave, and not in the arguments."""
        self.changed_arguments = False
        """A call gave a value, and changed an argument."""
        self._channel = channel
        self._name = name
        self._mailboxes = Mailboxes(self._serve)
        self._here = self._mailboxes.here
        self._serials = itertools.count(1)
        self._sending = threading.RLock()

    def start(self, *, first: int | None = None) -> None:
        """Begins to read, in a thread. This thread's partner is the other side's mailbox ``first``."""
        self._mailboxes.own()
        self._here.partners[0] = first
        threading.Thread(target=self._read, name="boundary", daemon=True).start()

    def serve_forever(self) -> None:
        """Serves the other side's requests in this thread until the connection ends."""
        self._mailboxes.serve_forever()

    def lose(self, reason: str) -> None:
        """Ends every conversation."""
        self.lost = self.lost or reason
        self._channel.close()
        self._mailboxes.close()

    # What proxies call

    def ask(self, op: str, *args: Any) -> Any:
        """One operation of the other side, to its end. Raises what it raised, and BoundaryError."""
        if self.before_asking is not None and len(self._here.partners) == 1 and op != "surroundings":
            self.before_asking()
        try:
            next(self._talk(op, args, awaits=False))
        except StopIteration as end:
            value, raised, cancelled = end.value
        else:
            raise BoundaryError("an operation waits outside of an event loop")
        if raised:
            raise self._believed(value, op, args, cancelled)
        return self.operators.derived(op, args, value) if self.rules.strict else value

    def awaited(self, own: Any) -> Generator[Any, Any, Any]:
        """Runs an awaitable of the other side to its end; the generator of an ``__await__`` here."""
        begun = time.monotonic()
        value, raised, cancelled = yield from self._talk("await", (own,), awaits=True)
        if self.rules.strict and time.monotonic() - begun > _A_WHILE_S and in_event_loop():
            for _ in range(_TURNS):
                yield
        if raised:
            raise self._believed(value, "await", (own,), cancelled)
        return value

    def _believed(
        self, error: BaseException, op: str, args: tuple[Any, ...], cancelled: list[BaseException]
    ) -> BaseException:
        """The exception to raise for one that came. One of this side's own may have been kept since another call;
        ``cancelled``: those of this call's own, by which a test cancelled what it waited for."""
        if not self.rules.strict or any(error is each for each in cancelled):
            return error
        return without_meaning(error, ends=self.operators.may_end(op, args))

    def partners(self) -> list[int | None]:
        """Whom this thread talks with."""
        return list(self._here.partners)

    def speak_for(self, partners: list[int | None]) -> None:
        """Makes this thread talk with another thread's partners, while that one waits for it."""
        self._here.partners = partners

    # One conversation

    def _talk(
        self, op: str, args: tuple[Any, ...], *, awaits: bool
    ) -> Generator[Any, Any, tuple[Any, bool, list[BaseException]]]:
        """Its value is the answer, whether that is an exception to raise (raised in here, a StopIteration would
        become another), and the exceptions that ended what the other side awaited in the meantime."""
        here = self._here
        box = self._mailboxes.own()
        if len(here.partners) > MAX_DEPTH:
            raise RecursionError(f"calls between tests and work are nested deeper than {MAX_DEPTH}")
        serial = next(self._serials)
        ended: list[BaseException] = []
        encoder = Encoder(self.exports.export)
        self._send({"q": op, "t": here.partners[-1], "f": box.number, "n": serial}, "a", args, encoder)
        while True:
            message = box.queue.get() if self.lost is None or not box.queue.empty() else None
            if message is None:
                raise BoundaryError(self.lost or "the connection is gone")
            if "q" in message:
                if awaits and message["q"] == "await":
                    yield from self._serve_await(message, ended)
                else:
                    self._serve(message)
                continue
            if message.get("n") != serial:
                self.lose(f"{self._name} answered what was not asked")
                continue
            if here.partners[-1] is None:
                here.partners[-1] = message.get("f")
            return (*self._result(message, encoder), ended)

    def _result(self, message: dict[str, Any], encoder: Encoder) -> tuple[Any, bool]:
        arguments = encoder.containers
        if self.rules.strict and message.get("m") and message.get("r") is not None:
            self.changed_arguments = True
            if self.keeps_arguments:
                arguments = copies(arguments)
        decoder = Decoder(self.imports.load, arguments)
        try:
            value = decoder.decode(message.get("e") if "e" in message else message.get("r"))
            for index, contents in message.get("m", ()):
                decoder.refill(arguments[index], contents)
        except (WireError, LookupError, TypeError, ValueError) as error:
            self.lose(f"{self._name} sent what is no value: {error}")
            raise BoundaryError(str(self.lost)) from None
        if self.refused is not None:
            refused, self.refused = self.refused, None
            raise refused
        if "e" in message:
            if not isinstance(value, BaseException):
                raise BoundaryError(f"{self._name} raised what is no exception")
            self.failures.returned(value)
            return value, True
        return value, False

    # Requests of the other side

    def _serve(self, message: dict[str, Any]) -> None:
        """Executes one request, and answers."""
        decoder, args = self._begin(message)
        if args is None:
            return
        before = [snapshot(each) for each in decoder.containers]
        try:
            result = self.service.perform(message["q"], args)
        except BaseException as error:  # noqa: BLE001 - whatever it is crosses, or ends the conversation there
            self._end(message, decoder, before, "e", self.service.crossing(error))
            return
        self._end(message, decoder, before, "r", result)

    def _serve_await(self, message: dict[str, Any], ended: list[BaseException]) -> Generator[Any, Any, None]:
        decoder, args = self._begin(message)
        if args is None:
            return
        try:
            result = yield from args[0].__await__()
        except BaseException as error:  # noqa: BLE001 - as above
            if not isinstance(error, (StopIteration, StopAsyncIteration)):
                ended.append(error)
            self._end(message, decoder, [], "e", self.service.crossing(error))
            return
        self._end(message, decoder, [], "r", result)

    def _begin(self, message: dict[str, Any]) -> tuple[Decoder, Any]:
        decoder = Decoder(self.imports.load)
        self._here.partners.append(message.get("f"))
        try:
            args = decoder.decode(message.get("a"))
            if type(args) is not tuple or type(message["q"]) is not str:
                raise WireError("not a request")
        except WireError as error:
            self._end(message, decoder, [], "e", RuntimeError(f"what was passed cannot cross: {error}"))
            return decoder, None
        return decoder, args

    def _end(self, message: dict[str, Any], decoder: Decoder, before: list[Any], kind: str, value: Any) -> None:
        self._here.partners.pop()
        containers = decoder.containers
        answer: dict[str, Any] = {"t": message.get("f"), "f": self._mailboxes.own().number, "n": message.get("n")}
        encoder = Encoder(self.exports.export, {id(each): index for index, each in enumerate(containers)})
        try:
            with self._sending:
                answer["m"] = [
                    [index, encoder.changed(containers[index])]
                    for index, was in enumerate(before)
                    if not same(was, snapshot(containers[index]))
                ]
            self._send(answer, kind, value, encoder)
        except (WireError, BoundaryError) as error:
            self.exports.told(arrived=False)
            answer["m"] = []
            self._send(answer, "e", RuntimeError(f"a result cannot cross: {error}"), Encoder(self.exports.export))

    # Messages

    def _send(self, message: dict[str, Any], field: str, value: Any, encoder: Encoder) -> None:
        """Encodes and sends as one step: another thread's message may not use a class that this one describes
        before it is sent."""
        if self.lost is not None:
            raise BoundaryError(self.lost)
        with self._sending:
            try:
                message[field] = encoder.encode(value)
                self._channel.send(message)
            except OSError as error:
                self.lose(f"{self._name}'s process has ended: {error.strerror}")
                raise BoundaryError(str(self.lost)) from None
            except WireError as error:
                self.exports.told(arrived=False)
                if "q" in message and self.rules.strict:
                    raise BoundaryError(f"{error}; such a test needs `trust: in_process`") from None
                raise
            except BaseException:
                self.exports.told(arrived=False)
                raise
            self.exports.told(arrived=True)

    def _read(self) -> None:
        reason = f"{self._name}'s process has ended"
        try:
            while True:
                self._mailboxes.deliver(self._channel.receive())
        except (EOFError, OSError):
            pass
        except (WireError, LookupError, TypeError) as error:
            reason = f"{self._name} sent what is no message: {error}"
        self.lose(reason)
