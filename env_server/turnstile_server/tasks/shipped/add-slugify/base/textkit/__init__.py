"""Small functions on text."""

from textkit.shorten import shorten
from textkit.words import count_words

__all__ = ["count_words", "shorten"]
