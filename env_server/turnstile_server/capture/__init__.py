"""The token tree of an episode: which earlier turn a call continues, and what a trainer gets of all turns.

Pure: no I/O, no clock, no task. The gate adds turns and asks questions; ``docs/matching.md`` prints every rule.

Reading order:

- ``keys``: hash keys of messages, tools and requests; runs of assistant messages as one group.
- ``compare``: a stored message and the one the agent sent: same, cosmetically different, or edited.
- ``volatile``: parts of system text that an agent spec excludes from the comparison.
- ``node``: a turn in its place in the tree.
- ``match``: finds the parent of a call. ``breaks``: why a call is not simply the next one on a known path.
- ``tree``: all turns of an episode, with the indexes that matching uses.
- ``retry``: what to do with a call that repeats an earlier one.
- ``quote_index``, ``provenance``: what each conversation is, and which turn brought it about.
- ``export``: the rows for a trainer. ``statistics``: the figures of an episode.
- ``token_path``: windows of a path's tokens. ``break_report``: the messages of breaks. For people to look at.
"""

from turnstile_server.capture.export import EpisodeFacts, export_forest, export_samples
from turnstile_server.capture.match import CallMatch
from turnstile_server.capture.node import Node
from turnstile_server.capture.retry import Action, EarlierCall, decide
from turnstile_server.capture.tree import TokenTree, Turns
from turnstile_server.capture.volatile import VolatileText

__all__ = [
    "Action",
    "CallMatch",
    "EarlierCall",
    "EpisodeFacts",
    "Node",
    "TokenTree",
    "Turns",
    "VolatileText",
    "decide",
    "export_forest",
    "export_samples",
]
