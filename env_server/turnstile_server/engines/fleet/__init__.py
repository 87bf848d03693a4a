"""Many engines as one: calls are spread over workers, queued fairly, resumed, and moved when a worker dies.

Read ``fleet`` first (the ``Engine`` that the gate sees), then ``calls`` with ``call`` (the path of one call), then
what these decide with, all of it pure:

- ``placement``: the worker that an episode belongs on; ``queue``: the call that goes next;
- ``limit`` and ``window``: how many calls, and episodes, a worker is given; ``prefix``: what its cache has;
- ``completion``: parts of a completion that was cut, joined exactly.

``worker`` is one engine and its state, ``roster`` all of them: health, joining, draining, fencing. ``pauses`` and
``updates`` hold calls and bring new weights to all workers. ``build`` makes a fleet from the settings. ``bounds``
has the constants.
"""
