"""A hosted model as the engine, for evaluation: messages go to an OpenAI-compatible or an Anthropic server.

There are no token ids here, so nothing of such an episode can be trained (``docs/evaluation.md``).
"""
