"""GRPO on a real small language model, and what it costs to train on other tokens than those it sampled."""
