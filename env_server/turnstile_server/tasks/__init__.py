"""Tasks: what an agent is asked, what it is given, and how its work is judged."""
