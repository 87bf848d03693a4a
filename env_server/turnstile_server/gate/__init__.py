"""The gate: the model API that agents call. It turns model calls into turns of an episode's token tree.

Read in this order: ``server`` (HTTP: address, key, reply), ``pipeline`` (the path of a call, in order), ``call``
(one generation and its callers), ``session`` (the state of one episode), ``turn_builder`` (prompt and turn).
``dialects`` reads and writes the agents' wire formats. ``bounds`` has the constants.
"""
