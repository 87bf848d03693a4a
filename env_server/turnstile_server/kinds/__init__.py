"""Kinds of task, each a room with its options, source, grader and the programs that it runs.

The rest of the server reaches them by their entry points alone (``turnstile.task_sources``,
``turnstile.graders``), and imports nothing from here: ``lint-imports`` holds that. So do kinds of other
packages.
"""
