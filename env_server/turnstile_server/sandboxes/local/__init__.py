"""Sandboxes on this machine: bubblewrap, or plain processes where that is explicitly allowed.

Read ``provider`` first, then ``process`` (what one sandbox has on the host), ``bubblewrap`` (its command line),
``cgroups`` (limits of a whole sandbox) and ``orphans`` (processes that a killed server left).
"""
