"""Turnstile's server: episodes, the gate, the journal, the engines."""
