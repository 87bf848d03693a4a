"""A running SGLang server as the engine.

``engine`` is the ``Engine``. Calls: ``generate`` (the format of ``/generate``), ``calls`` (calls in flight and the
weights that they will find), ``experts`` (routed experts of MoE models), ``score``. At start: ``start`` asks, and
``facts`` reads what the server says of itself. What a trainer does: ``control`` (pauses, sleep), ``weights`` (new
weights), ``groups`` (process groups).
"""
