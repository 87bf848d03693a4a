"""Repeats calls that fail; see README.md."""
