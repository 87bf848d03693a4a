"""Packages with tasks or scoring of their own, each in its own Python: swebench, verifiers, Inspect.

Their dependencies are not the server's, so no code of theirs is imported here: ``package_process`` starts a
program of ours in the Python that has the package, and speaks JSON lines with it (``programs/``). Which program,
and what becomes of its tasks and scores, is the matter of a kind of task (``kinds/packages``, ``kinds/swe``).
"""
