"""The in-sandbox helper. One thread, one selector; whatever touches an agent's files does so in a forked child
that has already become the agent."""
