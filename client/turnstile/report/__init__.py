"""The report of a run: one HTML file for people, with curves, tables and some episodes (``turnstile report``).

``from_server`` and ``from_folder`` gather a ``RunReport`` (``contents``), ``choose`` says which episodes are
shown, and ``page`` writes it. Nothing here needs more than the thin client.
"""
