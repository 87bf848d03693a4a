"""Loggers of rollouts for a trainer's own board: ``turnstile.loggers.wandb``, ``turnstile.loggers.tensorboard``.

Each is one module, and needs the extra of its name. ``base`` has what they log, by which a further one is written.
"""
