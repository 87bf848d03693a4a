"""Packages with tasks or scoring of their own, each in its own Python: swebench, verifiers, Inspect.

Their dependencies are not the server's, so no code of theirs is imported here: ``package_process`` starts one of
``programs/`` in the Python that has the package, and speaks JSON lines with it. What becomes of their tasks:
``kinds/packages/source.py``; of their scores: ``kinds/packages/grader.py``, ``grading/swe.py``.
"""
