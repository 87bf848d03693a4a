"""The token tree: which earlier turn a call continues, and what a trainer gets from the forest.

Pure: no I/O, no clock, no task. The gate pushes turns in and asks questions.
"""

from turnstile_server.capture.export import EpisodeFacts, export_forest, export_samples
from turnstile_server.capture.match import CallMatch
from turnstile_server.capture.node import Node
from turnstile_server.capture.retry import Action, EarlierCall, decide
from turnstile_server.capture.tree import TokenTree
from turnstile_server.capture.volatile import VolatileText

__all__ = [
    "Action",
    "CallMatch",
    "EarlierCall",
    "EpisodeFacts",
    "Node",
    "TokenTree",
    "VolatileText",
    "decide",
    "export_forest",
    "export_samples",
]
