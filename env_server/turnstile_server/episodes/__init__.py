"""Episodes: created, run to their end by one owner task each, stored, listed and exported.

In reading order:

- ``service``: ``Episodes``, the register behind the control API, the gate and the MCP endpoint.
- ``reader``: ``EpisodeReader``, its reading side, which a directory without a server has alone.
- ``plan``: what a request needs (task, agent, sandbox, limits), and the record and session it begins with.
- ``run``: ``EpisodeRun``, the owner task of an episode: prepare → run → drain → grade → store.
- ``lifecycle``: the decisions of that task as a pure state machine: transitions, stop requests, limits of time.
- ``places``: the queue of the episodes that wait for a place.
- ``groups``, ``staleness``: since when a group is there; episodes whose first tokens are too many versions old.
- ``sandbox``: the episode's sandbox, and the agent's process in it.
- ``own_tools``: the tools of its own that an episode has, opened and released.
- ``outcome``: how an episode ended, and what an agent's exit means.
- ``keys``: the key with which an agent opens its episode.
- ``store``: the journal records of an episode, and its token forest rebuilt from them.
- ``archive``: ended episodes, and the restore at the start of the server.
- ``work_store``, ``work_file``: the work that was handed to grading, kept to be judged again.
- ``regrade``, ``amendments``: kept work judged again; changes to the record of an ended episode.
- ``inspector``, ``turn_finder``: tokens, turns and breaks for people to look at; which episode a turn belongs to.
- ``work_viewer``: kept work as a diff.
- ``forks``, ``fork_point``: episodes that begin at a turn of another one, with the files of its snapshot.
- ``snapshot_store``, ``snapshot_file``, ``kept_files``: where snapshots lie; files that are whole or not there.
- ``accounting``: what the metrics count at the end of an episode.
- ``retention``: deletions, by request and by the bounds.
- ``listing``: the order of all episodes, by which pages are made, with indexes by status and group.
- ``register_routes``: what one of several worker processes tells the process in front of it.
- ``broadcast``: changes of status for the readers of ``GET /events``.
- ``auditor``: re-scores the recorded tokens of an episode and checks the invariants.
- ``bounds``: the constants.
"""
