"""The world of one episode: made, reset, called, graded, closed.

Owned by the episode's owner task, which closes it on every path. What must hold: what the world's code does wrong
is TaskFailed, with file and line; a sandbox that died under it stays SandboxFailed; every call ends in time,
whether or not the code returns; a grade is a checked number or there is none.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import cast

from turnstile_server.errors import AgentFailed, FileProblem, TaskFailed, TurnstileError, WorldUnavailable
from turnstile_server.kinds.worlds.definition import WorldDefinition, place_of
from turnstile_server.kinds.worlds.sandbox import BlockingSandbox
from turnstile_server.kinds.worlds.scores import components_of
from turnstile_server.kinds.worlds.thread import WorldBusy, WorldRaised, WorldThread
from turnstile_server.kinds.worlds.world import Start, World
from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.settings import Settings

_LOG = logging.getLogger(__name__)

GRACE_S = 1.0
"""Seconds that a tool waits for an earlier call that was given up: a coroutine needs a moment to be cancelled."""
SHOWN_CHARS = 500
"""Characters of an exception's text that an error shows."""


class Worlds:
    """Opens worlds, and counts those that are open: in threads, because their ends come from there."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._open = 0

    @property
    def open_worlds(self) -> int:
        """Worlds whose thread has not ended; one whose code never returns stays among them."""
        return self._open

    def open(self, definition: WorldDefinition, episode_id: str) -> EpisodeWorld:
        """A world of its own for one episode; nothing of it has run yet. Raises WorldUnavailable."""
        most = self._settings.worlds.max_open
        with self._lock:
            if self._open >= most:
                raise WorldUnavailable(
                    f"{most} worlds are open, the server's limit (worlds.max_open), those included whose code "
                    "never returned; the server's log names them"
                )
            self._open += 1
        return EpisodeWorld(definition, episode_id, self._settings, self._ended)

    def _ended(self) -> None:
        with self._lock:
            self._open -= 1


class EpisodeWorld:
    """One world, from ``reset`` to ``close``. ``on_end`` is called, in any thread, when nothing of it runs."""

    def __init__(
        self, definition: WorldDefinition, episode_id: str, settings: Settings, on_end: Callable[[], None]
    ) -> None:
        self.definition = definition
        self._episode_id = episode_id
        self._settings = settings
        self._thread = WorldThread(f"world-{episode_id}", on_end)
        self.on_step_reward: Callable[[object], None] = lambda reward: None
        """Called after a tool that gave its turn a reward: with whatever the world's code made of it."""
        self._made: World | None = None
        """Made, and used, in the thread only."""
        self._user_turns = 0
        self._over = not definition.talks
        self._closed = False

    async def reset(self, seed: int | None, instruction: str) -> Start:
        """Makes the world. ``seed`` None: the task's. ``instruction``: the task's, where ``reset`` gives none.

        Raises TaskFailed.
        """
        definition = self.definition
        chosen = definition.seed if seed is None else seed
        timeout_s = self._settings.worlds.reset_timeout_s

        def make_and_reset() -> object:
            self._made = world = definition.world_class()
            world.episode_id = self._episode_id
            # A copy, because the same task has other episodes, which must not see what this one changes.
            return world.reset(chosen, **copy.deepcopy(dict(definition.parameters)))

        begun = await self._call("reset", make_and_reset, timeout_s, "worlds.reset_timeout_s")
        return self._checked_start(begun, instruction)

    def show_sandbox(self, sandbox_of: Callable[[], Sandbox | None]) -> BlockingSandbox:
        """From now on the world may use the episode's sandbox, while ``sandbox_of`` gives one."""
        world = self._made
        assert world is not None
        shown = world.sandbox = BlockingSandbox(sandbox_of, self._settings.sandboxes)
        return shown

    async def respond(self, answer: str) -> str | None:
        """The user's reply to a message of the agent; None: the conversation is over. Raises TaskFailed."""
        if self._over:
            return None
        if self._user_turns >= self._settings.worlds.max_user_turns:
            self._over = True
            return None
        self._user_turns += 1

        def respond() -> object:
            world = self._world()
            world.answer = answer
            return world.respond(answer)

        said = await self._call(
            "respond", respond, self._settings.worlds.respond_timeout_s, "worlds.respond_timeout_s"
        )
        if said is None:
            self._over = True
            return None
        return self._checked_text("respond", said)

    async def run_tool(self, name: str, function: Callable[[World], object]) -> object:
        """Calls a tool of the world; the toolbox keeps its time. Raises WorldRaised, and WorldBusy where an
        earlier call was given up and has not returned."""
        overdue = await self._thread.overdue(GRACE_S)
        if overdue is not None:
            raise WorldBusy(overdue)

        def run() -> object:
            world = self._world()
            world.step_reward = None
            found = function(world)
            return awaited(world, found) if inspect.isawaitable(found) else (found, world.step_reward)

        async def awaited(world: World, found: Awaitable[object]) -> tuple[object, object]:
            return await found, world.step_reward

        result, reward = cast("tuple[object, object]", await self._thread.call(name, run, math.inf))
        if reward is not None:
            self.on_step_reward(reward)
        return result

    async def grade(self, answer: str | None) -> dict[str, float]:
        """The components of the reward. Raises TaskFailed, SandboxFailed; FileProblem where the code did not
        expect a file of the agent's to be missing or unreadable; AgentFailed where it failed after it had looked
        into the sandbox, because what lies there is the agent's."""
        sandbox = self._made.sandbox if self._made is not None else None
        looks = sandbox if isinstance(sandbox, BlockingSandbox) else None
        if looks is not None:
            looks.answered = False
        try:
            return await self._grade(answer)
        except TaskFailed as error:
            if looks is not None and looks.answered:
                raise AgentFailed(f"{error.message}, after it had looked into the agent's sandbox") from error
            raise

    async def _grade(self, answer: str | None) -> dict[str, float]:

        def grade() -> object:
            world = self._world()
            world.answer = answer
            return world.grade()

        given = await self._call("grade", grade, self._settings.worlds.grade_timeout_s, "worlds.grade_timeout_s")
        try:
            return components_of(given)
        except ValueError as error:
            raise self._failed(str(error)) from None

    async def solve(self) -> str | None:
        """Plays the known solution, and gives the answer to submit. Raises TaskFailed."""
        timeout_s = self._settings.worlds.grade_timeout_s
        answer = await self._call("solve", lambda: self._world().solve(), timeout_s, "worlds.grade_timeout_s")
        return None if answer is None else self._checked_text("solve", answer)

    async def close(self) -> None:
        """Closes the world and lets its thread end. Never raises: what its code does wrong here is logged. May be
        repeated."""
        if self._closed:
            return
        self._closed = True
        overdue = await self._thread.overdue(GRACE_S)
        if overdue is not None:
            _LOG.error(
                "world %s is not closed: a call of %s has not returned; it is closed if that ever returns",
                self.definition.name,
                overdue,
                extra={"episode_id": self._episode_id},
            )
            self._thread.finish(self._close)
            return
        if self._made is not None:
            timeout_s = self._settings.worlds.close_timeout_s
            try:
                await self._call("close", self._close, timeout_s, "worlds.close_timeout_s")
            except TurnstileError as error:
                _LOG.error(
                    "a world could not be closed: %s", error.message, extra={"episode_id": self._episode_id}
                )
        self._thread.finish()

    def _close(self) -> object:
        world = self._made
        if world is None:  # its `__init__` never returned, or raised
            return None
        world.sandbox = None
        return world.close() if self.definition.closes else None

    def _world(self) -> World:
        assert self._made is not None  # `reset` is the first call
        return self._made

    async def _call(self, what: str, function: Callable[[], object], timeout_s: float, setting: str) -> object:
        try:
            return await self._thread.call(what, function, timeout_s)
        except WorldBusy as busy:
            if busy.running == what:
                raise self._failed(f"{what} took longer than {timeout_s:g} s ({setting})") from None
            raise self._failed(
                f"{what} could not run within {timeout_s:g} s ({setting}): an earlier call of {busy.running} has "
                "not returned"
            ) from None
        except WorldRaised as raised:
            if isinstance(raised.error, TurnstileError):  # its sandbox died under it
                raise raised.error from None
            unreadable = raised.error.__cause__
            if what == "grade" and isinstance(unreadable, FileProblem):  # the agent's files, not the world's code
                raise unreadable from None
            _LOG.error(
                "%s of world %s failed",
                what,
                self.definition.name,
                exc_info=raised.error,
                extra={"episode_id": self._episode_id},
            )
            raise self._failed(f"{what} raised {self.shown(raised.error)}") from None

    def shown(self, error: BaseException) -> str:
        """The exception with the line of the world's file that it came through last."""
        file, _ = place_of(self.definition.world_class)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f" (line {lines[-1]})" if lines else ""
        text = str(error)[:SHOWN_CHARS]
        return f"{type(error).__name__}{f': {text}' if text else ''}{where}"

    def _failed(self, sentence: str) -> TaskFailed:
        return TaskFailed(f"world {self.definition.name}: {sentence}")

    def _checked_start(self, begun: object, instruction: str) -> Start:
        if begun is None:
            return Start(instruction)
        start = Start(begun) if isinstance(begun, str) else begun
        if not isinstance(start, Start):
            raise self._failed(f"reset returned a {type(begun).__name__}; it returns text, a Start or None")
        text = self._checked_text("reset", start.instruction)
        if not text.strip():
            raise self._failed("reset returned an empty instruction")
        return Start(text, start.files)

    def _checked_text(self, what: str, text: object) -> str:
        if not isinstance(text, str):
            raise self._failed(f"{what} returned a {type(text).__name__}; it returns text or None")
        most = self._settings.worlds.max_message_chars
        if len(text) > most:
            raise self._failed(
                f"{what} returned {len(text)} characters; the most is {most} (worlds.max_message_chars)"
            )
        return text.encode("utf-8", "backslashreplace").decode()
