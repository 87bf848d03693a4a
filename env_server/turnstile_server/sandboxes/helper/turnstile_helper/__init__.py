"""The in-sandbox helper. One thread, one selector; an agent's files are touched only by forked children
that have already become the agent."""
