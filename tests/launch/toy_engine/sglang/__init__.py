"""Stands for SGLang where ``launch.environment`` puts this folder's parent on PYTHONPATH."""
