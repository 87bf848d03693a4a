"""Rollouts in the shape that each trainer takes. A module or package per trainer; none is imported by another's.

An exporter takes rollouts (``turnstile.Rollout``) as ``rollouts()`` gives them and gives the trainer's own rows.
What all share is in ``turnstile.groups``. A further trainer is one more module here; what it needs installed is an
extra of the package, imported in that module alone.
"""
