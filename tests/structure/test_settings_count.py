"""Settings are few: only what an operator would change. Other bounds are constants (``settings/section.py``)."""

from __future__ import annotations

import re

from settings_doc import page

MOST_SETTINGS = 250
"""Lower it where settings go; a change that raises it says in its commit who would change the new one, and why."""
PER_EPISODE = ("sampling", "limits")
"""Tables of the page that are no settings of a server but fields of an episode."""


def test_there_are_no_more_settings_than_this() -> None:
    names = re.findall(r"^\| `([\w.]+)` \|", page(), re.MULTILINE)
    assert len({name for name in names if name.partition(".")[0] not in PER_EPISODE}) <= MOST_SETTINGS
