"""A shopping cart; see README.md."""
