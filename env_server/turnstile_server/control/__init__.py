"""The control API: HTTP for the trainer, behind the control key.

Read ``app`` (the application and its layers), ``api`` (the routes that change episodes), ``result_routes`` (one
episode), ``catalog`` (tasks and agents), ``protocol`` (what it needs of episodes), ``inspection_routes`` and
``work_routes`` (tokens, breaks and work, for people to look at), ``trainer_sampling``, ``events``, then ``body``,
``errors`` and ``auth``. ``bounds`` has the constants.
``openenv`` is the same service for OpenEnv's clients.
"""
