"""Sandboxes: where agents, their tools, set-up commands and hidden tests run.

Read ``protocol`` first (the contract of every backend), then ``endpoint`` (how a sandbox reaches the agent app),
``registry`` (the backends), ``pool``, ``helper_sandbox`` with ``helper_client`` and ``sockets`` (a sandbox with
the helper program inside), and the backends ``local`` and ``docker``. ``stream_provider`` is all of a backend that
has one byte stream to each sandbox, but for making it; ``kubernetes`` is one. ``background`` runs work that must
outlive its caller, ``run_folder`` locks the server's folder, ``wrapper`` is the base of wrapping sandboxes.
``first_that_works`` and ``no_sandboxes`` are the backends ``auto`` and ``none``. ``helper`` is the program that
runs inside every sandbox; it imports nothing of the server.
"""
