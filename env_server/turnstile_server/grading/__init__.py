"""Reward: computed on the host, from work judged in a fresh sandbox, never visible to the agent."""
