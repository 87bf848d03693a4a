"""Servers that speak NeMo-Gym's protocol: they have an agent's tools, and verify its work.

``source`` with ``rows`` (rows that such a server verifies), ``options`` (the grader's options), ``session`` (the
way to the server), ``tools`` (the agent's tools, in that session), ``grader``.
"""
