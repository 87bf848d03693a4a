"""Turnstile's thin client: token-exact episodes of real agents, for training loops."""
