"""Where the user that judges finds its programs."""

from __future__ import annotations

import pytest

from turnstile_server.sandboxes.protocol import User
from turnstile_server.sandboxes.search_path import search_path


@pytest.mark.parametrize(
    ("path", "left"),
    [
        ("/usr/bin:/bin", "/usr/bin:/bin"),
        ("/testbed/.venv/bin:/usr/bin", "/usr/bin"),
        ("/usr/bin:/testbed", "/usr/bin"),
        ("/testbedding/bin:/bin", "/testbedding/bin:/bin"),
        ("/opt/../testbed/bin:/bin", "/bin"),
        ("//testbed/bin:/bin", "/bin"),
        ("bin:.::/bin", "/bin"),
    ],
)
def test_the_judge_looks_in_no_folder_of_the_work(path: str, left: str) -> None:
    assert search_path(path, "/testbed/", User.TESTS) == left
    assert search_path(path, "/testbed", User.AGENT) == path
