"""TRL's AsyncGRPOTrainer on Turnstile, on a machine without a GPU: see ``train``."""
