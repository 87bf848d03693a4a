"""Constants of this package: bounds that nobody has asked to change. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.settings import Bounds


@dataclass(frozen=True)
class EpisodeBounds(Bounds):
    """Bounds of the life of episodes, and of what is kept and shown of them."""

    oldest_every: int = 8
    """Of so many places that come free while episodes wait, one goes to the episode that waits longest, whatever
    its priority and its group; 1: first come, first served."""
    remembered_groups: int = 10_000
    """Groups without an open episode whose age and staleness are remembered, the latest ones."""
    watch_interval_s: float = 1.0
    """How often the wall and idle limits and the leases are checked, and storing a refused end is tried again."""
    drained_linger_s: float = 10.0
    """A server that drains ends so long after its last episode; sooner where all that ended meanwhile were
    fetched."""
    max_subscribers: int = 64
    """Readers of `GET /events` at once; more are 429."""
    subscriber_queue: int = 1000
    """Undelivered events of one reader of `GET /events`; with more it is disconnected."""
    kept_events: int = 1000
    """The latest events, which a reader of `GET /events` that comes back is sent."""
    retention_interval_s: float = 60.0
    """How often the journal's retention is applied."""
    retention_retry_s: float = 10.0
    """The same while new episodes are refused: some may go now that were fetched too lately before."""
    fetch_grace_s: float = 120.0
    """So long after an episode has ended, or was fetched, no bound of size and no full disk deletes it: whoever
    fetched its samples may read its turns, spans and work next."""
    notice_interval_s: float = 60.0
    """Between two notices that retention has deleted something (`GET /events`)."""
    export_threads: int = 2
    """Worker threads that export samples of ended episodes."""
    max_reward_changes: int = 1000
    """Rewards that a trainer gives to one episode; each is one request, with any number of turns."""
    cached_trees: int = 64
    """Token trees of ended episodes kept in memory."""
    searched_episodes: int = 64
    """Ended episodes that are read from the disk to find a turn (`GET /turns/{id}/tokens` without `episode_id`);
    where more lived at that time, `episode_id` is needed."""
    cached_work_diffs: int = 8
    """Answers to `GET /episodes/{id}/work` kept in memory; each was made in a sandbox."""
    kept_regrades: int = 20
    """Regrades in the record of one episode, the latest ones and the one that is applied."""
    snapshots_at_once: int = 4
    """Snapshots taken at once, each in memory as a whole; further ones wait."""
    snapshot_wait_s: float = 60.0
    """With every_turn: how long a model call waits for the snapshot of the turn before it; then it goes on without
    one."""
    agent_output: int = 64 << 10
    """Bytes of an agent's output that are kept, the last ones."""
    max_spans: int = 5000
    """Tool calls, failed model calls and snapshots of one episode whose times are recorded ([spans](spans.md));
    further ones are counted."""
