"""Tasks: what an agent is asked, what it is given, and how its work is graded.

Read ``model`` first (a task, field by field, and the file format; ``files``, ``hidden_tests`` and ``script`` are
parts of it), then ``protocol`` (where tasks come from), ``registry`` (the task sources, and loading),
``task_files`` and ``parse`` (YAML and JSONL), ``rows`` (rows of data sets),
``images`` with ``image_build`` and ``dockerfile``, ``inline`` (the task of a request), ``tarball`` (a task's
files as a tar) and ``workspace`` (a task's sandbox).
"""
