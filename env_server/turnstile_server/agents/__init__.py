"""Agents that Turnstile launches: declarative specs, one file each."""
