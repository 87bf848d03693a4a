"""Sandboxes as Docker containers.

Read ``provider`` first, then ``containers`` (a container as a body of the Engine API), ``engine`` with ``calls``
(the calls to Docker, in threads), ``probes`` (which images run the helper), and, for images that do not,
``fallback`` with ``exec_process``, ``exec_stream`` and ``scripts``.
"""
