"""Capture gateways before the same agents and faults: which sampled tokens reach the trainer, and which do not."""
