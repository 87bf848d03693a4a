"""Engines that the server starts itself: started, watched, started again, and ended with all their processes.

Read ``command`` first (what is started, with which environment), then ``guardian`` (the program between the server
and the engine, which ends the engine when the server dies), ``guarded`` (the server's side of it), ``restarts``
(the policy), ``supervisor`` (``EngineProcess``, the owner of it all) and ``launched`` (the single engine of
``--launch``). ``bounds`` has the constants.
"""
