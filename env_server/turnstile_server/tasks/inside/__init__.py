"""Programs that run in an agent's sandbox before the agent: standard library only, Python 3.7 or later."""
