"""A policy that follows a script, in front of a real model. See examples/scripted_policy.py."""
