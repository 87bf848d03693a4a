"""Tasks of other projects' packages, verifiers and Inspect, which list and score them in a Python of their own.

``options`` (the packages, the text of a source, and the grader's options), ``source`` (the tasks that a package
lists), ``grader`` (the package scores a work), and ``programs/``, which run in the packages' Pythons.
"""
