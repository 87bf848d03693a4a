"""A policy that follows a script, in front of a real model: scripts (``script``, ``gold``) and the ``server``.

See examples/scripted_policy.py.
"""
