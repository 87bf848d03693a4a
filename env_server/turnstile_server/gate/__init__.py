"""The gate: the model door. ``turn.py`` is the whole path of a model call, in order."""
