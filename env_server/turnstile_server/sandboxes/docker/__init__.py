"""Sandboxes as Docker containers.

Read ``provider`` first, then ``launch`` (a container on its way) with ``transport`` (by which of two ways it is
reached) and ``containers`` (a container as a body of the Engine API), ``engine`` with ``address``, ``calls`` and
``attach`` with ``upgrade`` (the calls to Docker), ``server_files`` with ``volumes`` (how the
server's folders get into containers), ``probes`` (which images run the helper), and, for images that do not,
``fallback`` with ``exec_process``, ``exec_stream`` and ``scripts``.
"""
