"""Parts of benchmarks/episodes.py."""
