"""Parts of ``benchmarks/engine_edge.py``: the engine whose times are known, and the agents that watch for them."""
