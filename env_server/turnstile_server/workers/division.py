"""The settings of each worker process: its own folder, and its share of what the server may use. Pure.

What must hold: the shares of a limit add up to the limit, so that N workers together use what one server would. A
limit smaller than the number of workers cannot be shared: each worker needs one place of its own.
"""

from __future__ import annotations

from typing import Any, Final

from turnstile_server.data_dir import worker_folder
from turnstile_server.errors import StartupError
from turnstile_server.sandboxes.dial_out.listener import LinkAddress
from turnstile_server.settings import JudgeSettings, Section, Settings

PLACES: Final = (
    ("episodes", "max_open"),
    ("episodes", "max_running"),
    ("episodes", "keep_work_bytes"),
    ("episodes", "keep_snapshot_bytes"),
    ("episodes", "keep_replay_bytes"),
    ("grading", "parallel"),
    ("sandboxes", "max_open"),
    ("sandboxes", "max_connections_total"),
    ("sandboxes", "docker_parallel"),
    ("sandboxes", "warm"),
    ("worlds", "max_open"),
    ("egress", "max_open_total"),
    ("gate", "max_calls"),
    ("gate", "max_body_bytes_total"),
    ("engine", "max_connections"),
    ("fleet", "max_waiting"),
    ("journal", "max_queue_bytes"),
    ("journal", "retention_bytes"),
    ("openenv", "max_sockets"),
    ("openenv", "max_sessions"),
)
"""Limits over all episodes, of which each worker gets a whole number."""
OF_THE_MACHINE: Final = (("episodes", "max_running"), ("grading", "parallel"), ("sandboxes", "max_open"))
"""Those whose default is made of the machine's cores and memory."""
SHARES: Final = (("fleet", "cache_fill"), ("journal", "retention_share"))
"""Parts of something that all workers share."""
_OF_A_JUDGE: Final = ("parallel", "max_calls", "max_total_tokens")


def share_of(total: int, number: int, count: int) -> int:
    """The part of ``total`` that worker ``number`` of ``count`` gets; the parts differ by 1 at most."""
    return total // count + (1 if number < total % count else 0)


def worker_settings(settings: Settings, number: int, count: int, *, key: str | None) -> Settings:
    """The settings of worker ``number`` of ``count``. ``key``: the control key of the whole server.

    Raises StartupError for a limit that was set to less than ``count``. Defaults are raised to one place each.
    """
    sections: dict[str, dict[str, Any]] = {
        "control": {"key": key, "trust_forwarded": True},  # the process in front says who called
        "workers": {"count": 1},
    }
    for section, field in PLACES:
        total = _value(settings, section, field)
        if total:
            sections.setdefault(section, {})[field] = _place(settings, section, field, total, number, count)
    for section, field in SHARES:
        share = _value(settings, section, field)
        if share:
            sections.setdefault(section, {})[field] = share / count
    judges = {name: _judge(judge, name, number, count) for name, judge in settings.grading.judges.items()}
    sections.setdefault("grading", {})["judges"] = judges
    if number and settings.sandboxes.link_address is not None:
        address = LinkAddress.parse(settings.sandboxes.link_address)
        sections["sandboxes"]["link_address"] = str(LinkAddress(address.host, address.port + number))
    if number and settings.sandboxes.run_dir is not None:  # a folder of sandboxes has one owner
        sections["sandboxes"]["run_dir"] = settings.sandboxes.run_dir / f"w{number}"
    update: dict[str, Any] = {
        name: vars(settings)[name].model_copy(update=changes) for name, changes in sections.items()
    }
    update["data_dir"] = worker_folder(settings.data_dir, number)
    return settings.model_copy(update=update)


def told_shares(settings: Settings, count: int) -> str | None:
    """A log line with the limits that the workers together raise above the defaults; None where there are none."""
    raised = [
        f"{section}.{field} is {_value(settings, section, field)}"
        for section, field in PLACES
        if 0 < (_value(settings, section, field) or 0) < count and not _was_set(settings, section, field)
    ]
    if not raised:
        return None
    return f"each of the {count} workers has one place of its own, though {', '.join(raised)} by default"


def _place(settings: Settings, section: str, field: str, total: int, number: int, count: int) -> int:
    if total < count and _was_set(settings, section, field):
        raise StartupError(
            f"{section}.{field} is {total}, and there are {count} worker processes, of which each needs one: "
            "raise it, or start fewer (--workers)"
        )
    return max(1, share_of(total, number, count))


def _judge(judge: JudgeSettings, name: str, number: int, count: int) -> JudgeSettings:
    changes = {}
    for field in _OF_A_JUDGE:
        total = vars(judge)[field]
        if total is not None:
            if total < count and field in judge.model_fields_set:
                raise StartupError(
                    f"grading.judges.{name}.{field} is {total}, and there are {count} worker processes, of which "
                    "each needs one: raise it, or start fewer (--workers)"
                )
            changes[field] = max(1, share_of(total, number, count))
    return judge.model_copy(update=changes)


def _value(settings: Settings, section: str, field: str) -> Any:
    if (section, field) in OF_THE_MACHINE:
        return vars(settings)[section].places
    return vars(vars(settings)[section])[field]


def _was_set(settings: Settings, section: str, field: str) -> bool:
    found: Section = vars(settings)[section]
    return field in found.model_fields_set


def agent_ports(port: int, count: int, *, one: bool) -> list[int]:
    """The ports of the workers' agent listeners; 0: a free one. ``one``: the process in front has the port, and
    each worker one that only that process uses. Raises StartupError where there are not so many."""
    if one or port == 0:
        return [0] * count
    if port + count - 1 > 65_535:
        raise StartupError(f"gate.port {port} leaves no ports for {count} workers")
    return list(range(port, port + count))
