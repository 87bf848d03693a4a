"""Dialects: the agents' own wire formats, in and out. Pure: data in, data out, no I/O."""
