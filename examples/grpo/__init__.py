"""GRPO in plain PyTorch on episodes of a real agent. See docs/grpo.md."""
