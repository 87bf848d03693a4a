"""Tasks that are Python classes. Authors import from ``turnstile_server.worlds``.

Read ``world`` first (what a world is, method by method), then ``declare`` (``@tool``), ``definition`` and
``load`` (finding and checking worlds when a server starts), ``source`` (their tasks), ``environment`` (a world as
the core knows it), ``running_world`` (the world of one episode), ``episode_world`` (its calls, from reset to
close), ``thread`` (where its code runs), ``served`` (its tools), ``sandbox`` (its view of the sandbox), ``scores``
(what ``grade`` gives), ``untouched`` (who made a world fail) and ``grader`` (its component).
"""
