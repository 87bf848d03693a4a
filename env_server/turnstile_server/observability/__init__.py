"""Metrics of the server, in the Prometheus format: ``metrics``."""
