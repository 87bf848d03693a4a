"""Small tables; see README.md."""
