"""Metrics of the server, in the Prometheus format: ``metrics``. ``bounds`` has the constants of live samples and
of the export of spans."""
