"""The campaign: random faults against a whole server, and a checker that knows what really happened."""
