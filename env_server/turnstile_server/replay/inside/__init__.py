"""Programs that run inside the agent's sandbox."""
