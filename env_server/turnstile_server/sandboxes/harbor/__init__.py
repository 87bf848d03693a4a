"""Sandboxes as environments of Harbor (``sandboxes.kind = harbor:NAME``), whichever provider they are of.

Read ``backend`` first, then ``environments`` (what is used of Harbor), ``host_files`` (the server's folders in an
environment, and how the helper is started there) and ``sandboxes/dial_out`` (how it calls the server).
"""
