"""States of episodes' work folders, one after each turn's tool calls: taken in the sandbox, kept by content."""
