"""docs/errors.md says of every error what errors.py says, and of no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from turnstile_server.episodes.staleness import StaleGroup, StaleWeights
from turnstile_server.errors import StartupError, TurnstileError
from turnstile_server.grading.errors import RewardInvalid
from turnstile_server.grading.script import ScriptFailed
from turnstile_server.offline_app import ReadOnly
from turnstile_server.rendering.token_text import NoTokenizer
from turnstile_server.workers.engine_control import NotShared
from turnstile_server.workers.link import WorkerRestarting

DOC = Path(__file__).parents[2] / "docs" / "errors.md"
ROW = re.compile(r"^\| (\d{3}) \| `(\w+)` \| (.+) \| (yes|no) \|$", re.MULTILINE)


def classes(base: type[TurnstileError] = TurnstileError) -> Iterator[type[TurnstileError]]:
    """Every error that has a type of its own: a subclass without one is told like its base."""
    if "type" in vars(base):
        yield base
    for derived in base.__subclasses__():
        yield from classes(derived)


def test_the_table_has_each_error_with_its_status_and_whether_it_is_retried() -> None:
    told = [(int(status), name, retried == "yes") for status, name, _, retried in ROW.findall(DOC.read_text())]
    wanted = {(error.status, error.type, error.retryable) for error in classes() if error is not StartupError}
    beside = {
        StaleGroup,
        StaleWeights,
        RewardInvalid,
        ReadOnly,
        NoTokenizer,
        NotShared,
        ScriptFailed,
        WorkerRestarting,
    }
    assert {error.type for error in beside} <= {name for _, name, _ in wanted}, "those beside errors.py too"
    assert sorted(told) == sorted(wanted)


def test_only_what_a_later_attempt_may_cure_has_a_status_that_sdks_retry() -> None:
    for error in classes():
        if error.retryable:
            assert error.status in (408, 429) or error.status >= 500


def test_each_type_names_one_error() -> None:
    names = [error.type for error in classes()]
    assert len(names) == len(set(names))
