"""What is kept of episodes on disk, and how it comes back.

The last EPISODE record is the episode; TURN, DELIVERY and DISCARD records rebuild its tree.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from turnstile.models import Episode
from turnstile_server.capture import EpisodeFacts, TokenTree, episode_statistics
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.journal.records import delivery_of, discard_of, episode_record, turn_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """An episode as it is journaled, with what recognises a repeated creation."""

    episode: Episode
    key_nonce: str
    idempotency_key: str | None
    request_digest: str

    def record(self) -> Record:
        """The episode's own fields, so that the journal's retention finds status and timings."""
        meta = self.episode.model_dump(mode="json")
        meta["creation"] = {
            "key_nonce": self.key_nonce,
            "idempotency_key": self.idempotency_key,
            "request_digest": self.request_digest,
        }
        return episode_record(self.episode.episode_id, meta)


def stored_of(record: Record) -> Stored:
    """Raises pydantic.ValidationError, KeyError or TypeError for a record this version cannot read."""
    fields = dict(record.meta)
    creation = fields.pop("creation")
    return Stored(Episode.model_validate(fields), **creation)


@dataclass(frozen=True, slots=True)
class Forest:
    """An episode's token tree and its discarded tokens by reason."""

    tree: TokenTree
    discarded: Counter[str]

    def counted(self, episode: Episode) -> Episode:
        """The episode with its statistics as they are now."""
        return episode.model_copy(update={"stats": episode_statistics(self.tree, self.discarded)})

    def facts(self, episode: Episode) -> EpisodeFacts:
        """What every exported row of the episode carries."""
        return EpisodeFacts(
            episode_id=episode.episode_id,
            rollout_id=episode.rollout_id,
            status=episode.status,
            group_id=episode.group_id,
            attempt=episode.attempt,
            reward=episode.reward,
            discarded=dict(self.discarded),
            metadata=episode.metadata,
        )


def rebuild(records: Iterable[Record]) -> Forest:
    """The forest from an episode's records, in order.

    The journal leaves out what the disk damaged: turns that went on from a lost turn have no prompt any more and
    are left out too, each with a line in the log.
    """
    tree = TokenTree()
    discarded: Counter[str] = Counter()
    known: set[str] = set()
    for record in records:
        match record.type:
            case RecordType.TURN:
                turn = turn_of(record)
                if turn.parent_id is None or turn.parent_id in known:
                    tree.add(turn)
                    known.add(turn.turn_id)
                else:
                    _LOG.error("turn %s is left out: its parent %s is lost", turn.turn_id, turn.parent_id)
            case RecordType.DELIVERY:
                delivery = delivery_of(record)
                if delivery.turn_id in known:
                    tree[delivery.turn_id].delivery = delivery.state
            case RecordType.DISCARD:
                discard = discard_of(record)
                discarded[discard.reason] += discard.tokens
    return Forest(tree, discarded)
