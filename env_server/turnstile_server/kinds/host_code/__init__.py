"""Graders whose code runs on the server's machine, each time in a process of its own: functions, OpenEnv
rubrics, and the check against a JSON schema.

Read ``process`` (starts and ends the process), ``runner`` (the program in it), then ``graders``.
"""
