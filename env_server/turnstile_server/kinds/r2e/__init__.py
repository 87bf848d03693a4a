"""R2E-Gym: tasks whose images hold the hidden tests and the script that runs them.

``options`` (the outcomes that must be had), ``rows`` (a row becomes a task), ``grader`` with ``test_log``.
"""
