"""Parts of ``benchmarks/gate.py``: conversation, mock engine, servers, client, report."""
