"""What `tool-loop` and `plain-loop` are made of: standard library only, Python 3.9 or later."""
