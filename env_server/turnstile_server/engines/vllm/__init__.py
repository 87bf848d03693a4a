"""A running vLLM server as the engine.

``engine`` is the ``Engine``. Calls: ``generate`` (the format of ``/inference/v1/generate``), ``calls`` (those in
flight and the age of their cache), ``score``, ``load``. At start: ``start``. What a trainer does: ``weights``
(pauses and new weights) through ``workers`` (calls into vLLM's workers, where ``extension/`` is loaded).
"""
