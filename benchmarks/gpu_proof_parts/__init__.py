"""Parts of ``benchmarks/gpu_proof.py``: ``commands``, ``other_weights``, ``distances`` and ``tables``."""
