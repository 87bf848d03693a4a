"""The boundary between hidden tests and the work: two processes, one for each, that exchange copies of values.

Read ``wire`` first (values as JSON), then ``peer`` (calls and calls back) with ``mailboxes`` (its threads),
``proxies`` and ``proxy_operators`` (what stands for an object of the other side, and what of it is believed),
``exports`` (how one's own objects are shown to the other side), ``guard`` (what the work may do with an object of
the tests), ``failures`` (those of a test that the work may not swallow), ``work_server`` (the work's process) and,
in the one that judges, ``importer`` and ``work_process``.

What must hold: nothing that the work sends is unpickled, imported or run; it arrives as plain values, as proxies,
or as exceptions. The work reaches only those objects of the tests that a test handed to it."""
