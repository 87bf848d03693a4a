"""Free time between meetings; see README.md."""
