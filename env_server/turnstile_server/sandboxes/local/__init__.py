"""Sandboxes on this machine: bubblewrap, or plain processes where that is explicitly allowed.

Read ``provider`` first, then ``process`` (what one sandbox has on the host), ``bubblewrap`` (its command line),
``cgroups`` (limits of a whole sandbox), ``machine_kills`` (what shows that memory ran out, without them) and
``orphans`` (processes that a killed server left).
"""
