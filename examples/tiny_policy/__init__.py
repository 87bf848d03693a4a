"""How the tiny policy that ships was made, and how it is evaluated in memory. See README.md."""
