"""Agents rehearsed without a model: a policy writes what a model would sample, all else is the real server."""
