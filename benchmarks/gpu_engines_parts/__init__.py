"""Parts of ``benchmarks/gpu_engines.py``: its commands, its model, its load, and the trainer's side."""
