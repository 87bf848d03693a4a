"""Certification: what a validator of environments wants proven about a task set, measured on its tasks.

The checks have the ids of OpenEnv's validation policy (RFC 008), which names them and implements few. Read
``check_result`` (what a check says) first, then ``episode_play`` (a task, played), ``reward_checks``
with ``attacks``, ``start_checks``, ``leak_check`` and ``isolation_check`` with ``start_scan`` (it runs
``scan_start`` inside sandboxes), ``declarations`` with ``declaration_checks`` (what a manifest promises),
``certifier`` (all checks of one task) and ``certificate`` (the report).
"""
