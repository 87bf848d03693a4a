"""Parts of `tool-loop` and `plain-loop`: standard library only, Python 3.9 or later."""
