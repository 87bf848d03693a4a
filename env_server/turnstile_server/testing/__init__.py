"""A server without a model: a scripted policy writes what a model would sample, and everything else is real.

Read ``policy`` first (a policy and the chat format that it reads and writes), then ``shell_policy`` (a policy for
any agent that can run commands), ``scripted_engine`` (an engine whose completions a policy writes), ``recording``
(sandboxes that record what an agent does), ``server`` (the whole server), ``doctor`` (a check of one agent),
``world_play`` (tasks that are Python classes, played by functions), ``machine`` and ``sandbox_probes`` (what holds
sandboxes on this machine), ``installed_plugins`` (what packages add).
``model/`` holds a small tokenizer with a chat template and no weights.
"""
