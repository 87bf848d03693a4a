"""Parts of the benchmarks of the fleet (``back_pressure.py``, ``placement.py``)."""
