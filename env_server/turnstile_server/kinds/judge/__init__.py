"""A language model as grader.

Read ``grader`` first (one component from votes), then ``prompt`` (what a judge is shown, with the work's text as
fenced data), ``verdict`` (the strict reading of its reply), ``client`` (one call), ``judges`` (the judges of the
settings with their budgets) and ``cache`` (verdicts on disk).
"""
