"""SWE-bench and its relatives: rows of their data sets, judged by the rules of the package ``swebench``.

``options`` (the tests of a task), ``rows`` with ``data_sets`` and ``scripts`` (a row becomes a task),
``grader``, and ``programs/`` (the program that runs in the Python of ``swebench``).
"""
