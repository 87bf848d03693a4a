"""How the examples that train end: with an exit code, with what failed, and with all that they started stopped."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from turnstile import TurnstileError
from turnstile_server.demo.checks import leaves
from turnstile_server.demo.local_server import LocalServerError, interrupt_on_termination


def exit_code_of(work: Coroutine[Any, Any, None], *expected: type[Exception]) -> int:
    """Runs ``work``: 0, or 1 after showing errors of the ``expected`` types, Turnstile's or the server's. Any
    other error is raised."""
    kinds: tuple[type[Exception], ...] = (*expected, LocalServerError, TurnstileError)
    failed: list[BaseException] = []
    try:
        asyncio.run(work)
    except* kinds as errors:
        failed = leaves(errors)
    for error in failed:
        print(f"Failed: {error}", file=sys.stderr)
    return 1 if failed else 0


def run_program(main: Callable[[], int]) -> None:
    """Ends this process with the exit code of ``main``; with 130 when it was interrupted or terminated."""
    interrupt_on_termination()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("Interrupted; everything was stopped.", file=sys.stderr)
        sys.exit(130)
