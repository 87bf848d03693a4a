"""Harbor's task folders (Terminal-Bench 2 has the same), loaded as they are.

Read ``source`` first (which folders are taken), then ``folder`` (a folder to a task, or all that is wrong with it)
with ``folder_parts`` and ``steps`` (what a folder has, and each of its steps), ``config`` with ``toml_lines`` (the
keys of ``task.toml`` and the lines that they stand on), ``image`` with ``compose`` (where the image comes from),
``refusals`` and ``test_text`` (what is sound in Harbor and cannot be played here), collected in ``findings``.
"""
