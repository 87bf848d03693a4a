"""Several worker processes behind one control API: ``turnstile serve --workers N`` (``docs/workers.md``).

In reading order:

- ``serve``: the process in front, from its start to its end; ``front`` joins its parts.
- ``division``: each worker's share of the settings.
- ``child``, ``worker``: a worker process, seen from the process in front; the program that it runs. ``orders``:
  what the one hands to the other.
- ``link``: requests to one worker over its Unix socket. ``crew``: all of them.
- ``ownership``, ``placement``: which worker has which episode; where a new one goes. ``creation`` uses both.
- ``route_table``: what becomes of each route of the control API. ``forward`` passes requests and answers on.
- ``listing``, ``overview``: many workers' episodes as one list. ``events``, ``merged_metrics``, ``merged_live``:
  the same for changes of status and for counters.
- ``sockets``: WebSockets. ``engine_control``: what a trainer does to the engines that all workers share.
  ``shared_engine``: an engine that is started once for all.
- ``agent_router``: one port for all agents.
- ``bounds``: the constants.
"""
