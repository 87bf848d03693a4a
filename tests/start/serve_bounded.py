"""A server with other bounds: ``python serve_bounded.py '{"gate": {"head_timeout_s": 2}}'``.

Its settings are in the environment.

Bounds are constants that only code can replace, so a test that needs a small one starts this and not the command.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bounded import bounded_settings
from turnstile_server.process import run

if __name__ == "__main__":
    sys.exit(run(bounded_settings(**json.loads(sys.argv[1]))))
