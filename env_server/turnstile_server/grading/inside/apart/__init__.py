"""A command that judges in one sandbox, and the programs of the work in another, joined by a wire.

``check_side`` stands in the place of the launcher where the command judges, ``work_side`` starts what it asks for
where the work is. No process of the work ever runs in the command's sandbox: what one leaves in the folders that
both have comes over as the bytes of regular files (``folders``). All that comes from the work's side is taken as
if the work had sent it.

Python 3.9 or later, standard library only.
"""
