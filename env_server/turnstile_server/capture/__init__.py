"""The token tree: which earlier turn a call continues, and what a trainer gets from the forest.

Pure: no I/O, no clock, no task. The gate pushes turns in and asks questions.
"""

from turnstile_server.capture.export import EpisodeFacts, episode_statistics, export_samples
from turnstile_server.capture.forest import export_forest
from turnstile_server.capture.match import Match
from turnstile_server.capture.retry import Action, EarlierCall, decide
from turnstile_server.capture.tree import Node, TokenTree

__all__ = [
    "Action",
    "EarlierCall",
    "EpisodeFacts",
    "Match",
    "Node",
    "TokenTree",
    "decide",
    "episode_statistics",
    "export_forest",
    "export_samples",
]
