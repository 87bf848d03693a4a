"""Episodes as journal records, and back.

The last EPISODE record is the episode; TURN, DELIVERY and DISCARD records rebuild its tree. Records that cannot be
read (of another version, or damaged) become an episode that says so; a turn that cannot be read is left out, and
so are the turns that continue it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from turnstile.models import Episode, EpisodeStatus, ErrorInfo, Limits, NetworkReport, Sampling, Turn
from turnstile.models.base import check_json
from turnstile.models.faults import fault_text
from turnstile_server.capture import EpisodeFacts, TokenTree, Turns
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.journal.records import delivery_of, discard_of, episode_record, turn_of

_LOG = logging.getLogger(__name__)
RECORD_UNREADABLE = "record_unreadable"
"""The type of the error of an episode whose record cannot be read."""
PARENT_LOST = "parent_lost"
"""Reason why tokens of a whole turn are discarded: the disk has damaged a turn that it continues."""
_NETWORK = "network"
_MAX_DEPTH = 190
"""Readers of JSON stop at 200 levels, and listings nest a record deeper."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An episode as it is journaled. ``request_digest`` recognises the same creation under one idempotency key."""

    episode: Episode
    key_nonce: str
    idempotency_key: str | None
    request_digest: str
    network: NetworkReport | None = None
    """The network report of an episode that ends; kept in its record only."""

    def record(self) -> Record:
        """The journal record; the episode's fields are at its top, where retention finds status and timings."""
        meta = self.episode.model_dump(mode="json", exclude={"why"})  # made anew for each answer
        meta["creation"] = {
            "key_nonce": self.key_nonce,
            "idempotency_key": self.idempotency_key,
            "request_digest": self.request_digest,
        }
        if self.network is not None and self.network.decisions:
            meta[_NETWORK] = self.network.model_dump(mode="json")
        return episode_record(self.episode.episode_id, meta)


class DamagedRecord(ValueError):
    """The disk has damaged the last record of an episode. The message says where."""


def stored_of(record: Record) -> Stored:
    """Read a journal record. Raises ValueError (also pydantic's), KeyError or TypeError if this version cannot."""
    fields = dict(record.meta)
    check_json(fields, max_depth=_MAX_DEPTH)  # no reader of the answers could take more
    creation = fields.pop("creation")
    fields.pop(_NETWORK, None)
    fields.pop("why", None)
    return Stored(Episode.model_validate(fields), **creation)


def created_at(record: Record) -> float:
    """When the episode of a record of its state was created, Unix seconds; -inf where the record does not say."""
    timings = record.meta.get("timings")
    found = timings.get("created_at") if isinstance(timings, Mapping) else None
    return float(found) if isinstance(found, int | float) else -math.inf


def network_of(records: Iterable[Record]) -> NetworkReport | None:
    """The network report in the last record of an episode; None: it has none, or this version cannot read it."""
    report: NetworkReport | None = None
    for record in records:
        if record.type is RecordType.EPISODE and _NETWORK in record.meta:
            try:
                report = NetworkReport.model_validate(record.meta[_NETWORK])
            except ValidationError as error:
                _LOG.error("the network of episode %s cannot be read: %s", record.episode_id, error)
    return report


def unreadable_episode(episode_id: str, fields: Mapping[str, Any], error: Exception) -> Episode:
    """The episode to show for a record that ``error`` made unreadable: failed, with its readable fields."""
    problems = _problems(error)
    if isinstance(error, DamagedRecord):
        message = (
            f"the episode's last record is lost ({error}); what is shown is from the record before it, if there "
            "is one. Its turns are exported as far as they are whole"
        )
    else:
        message = (
            "this version of the server cannot read the episode's record "
            f"({'; '.join(list(problems.values())[:5])}). Read it with the version that wrote it, or delete it"
        )
    fixed: dict[str, Any] = {
        "episode_id": episode_id,
        "status": EpisodeStatus.FAILED,
        "error": ErrorInfo(type=RECORD_UNREADABLE, message=message),
        "reward": None,
    }
    blank: dict[str, Any] = {
        "agent": "unknown",
        "task": {},
        "rollout_id": episode_id,
        "sampling": Sampling(),
        "limits": Limits(),
        "timings": {"created_at": 0.0},
    }
    kept = {
        name: value
        for name, value in fields.items()
        if name in Episode.model_fields and name not in problems and name != "schema_version" and _is_json(value)
    }
    try:
        return Episode.model_validate(blank | kept | fixed)
    except ValidationError:  # what was wrong hid a second fault
        return Episode.model_validate(blank | fixed)


def _is_json(value: Any) -> bool:
    try:
        check_json(value)
    except ValueError:
        return False
    return True


def _problems(error: Exception) -> dict[str, str]:
    """Top-level field to a short sentence, for the first few that are wrong."""
    if isinstance(error, PydanticSerializationError):
        return {"": f"a value has no JSON form: {str(error)[:200]}"}
    if isinstance(error, KeyError | TypeError):
        return {"creation": "creation: missing or of another shape"}
    if not isinstance(error, ValidationError):
        return {"": str(error)[:200]}
    found: dict[str, str] = {}
    for item in error.errors(include_url=False, include_input=False):
        place = [str(part) for part in item["loc"]]
        found.setdefault(place[0] if place else "", f"{'.'.join(place)[:100]}: {fault_text(item)[:200]}")
    return found


@dataclass(frozen=True, slots=True)
class Forest:
    """An episode's token tree and its discarded tokens by reason."""

    tree: TokenTree
    discarded: Counter[str]

    @property
    def own_turn_ids(self) -> list[str]:
        """In commit order, without those that a fork began with, which are rewarded where they were sampled."""
        return [node.turn_id for node in self.tree if not node.inherited]

    @property
    def last_turn_at(self) -> float | None:
        """When the last turn was there, in Unix seconds; None without a turn."""
        timings = [node.turn.timings for node in self.tree]
        return max((each.started_at + each.total_s for each in timings), default=None)

    def counted(self, episode: Episode) -> Episode:
        """The episode with its statistics as they are now."""
        return episode.model_copy(update={"stats": self.tree.statistics(self.discarded)})

    def facts(self, episode: Episode) -> EpisodeFacts:
        """The facts that every exported row of the episode carries: its metadata, and ``staleness`` where it
        exceeded its bound."""
        stale = episode.staleness
        mark = {} if stale is None or not stale.exceeded else {"staleness": stale.model_dump(mode="json")}
        return EpisodeFacts(
            episode_id=episode.episode_id,
            rollout_id=episode.rollout_id,
            status=episode.status,
            group_id=episode.group_id,
            attempt=episode.attempt,
            reward=episode.reward,
            turn_rewards=episode.turn_rewards,
            discarded=dict(self.discarded),
            metadata={**episode.metadata, **mark},
        )


def rebuild(records: Iterable[Record], inherited: Sequence[Turn] = ()) -> Forest:
    """Build the forest from an episode's records, in order. ``inherited``: the turns that a fork began with.

    A turn that the disk damaged is missing, one of another version cannot be read. Turns that continue such a turn
    have no prompt any more, so they are left out too, each with a line in the log.
    """
    tree = TokenTree()
    tree.graft(inherited)
    discarded: Counter[str] = Counter()
    known = {turn.turn_id for turn in inherited}
    for record in records:
        try:
            match record.type:
                case RecordType.TURN:
                    turn = turn_of(record)
                    if turn.turn_id in known:  # a segment was copied, or its bytes were appended to it again
                        _LOG.error("turn %s is recorded twice: the second record is left out", turn.turn_id)
                    elif turn.parent_id is None or turn.parent_id in known:
                        tree.add(turn)
                        known.add(turn.turn_id)
                    else:
                        _LOG.error("turn %s is left out: its parent %s is lost", turn.turn_id, turn.parent_id)
                        discarded[PARENT_LOST] += len(turn.completion_ids)
                case RecordType.DELIVERY:
                    delivery = delivery_of(record)
                    if delivery.turn_id in known:
                        node = tree[delivery.turn_id]
                        node.record_delivery(delivery.state)
                        node.commit_s = delivery.commit_s
                case RecordType.DISCARD:
                    discard = discard_of(record)
                    discarded[discard.reason] += discard.tokens
        except (ValueError, KeyError, TypeError) as error:
            name = record.meta.get("turn_id", "")
            _LOG.error("a %s record %s of %s cannot be read: %s", record.type.name, name, record.episode_id, error)
    return Forest(tree, discarded)


def unchanging(episode: Episode, forest: Forest) -> Turns:
    """The turns for a thread, without those that are added meanwhile."""
    return forest.tree if episode.status.ended else forest.tree.snapshot()
