"""The log parsers of ``swebench`` 5.0.2 by name, so that a row which names another is told when it is loaded.

The package itself runs in another Python, and is started for the first grading.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final

from turnstile_server.kinds.swe.options import SWEBENCH

_PREFIX = "parse_log_"
_NAMES = """
    pytest pytest_options django pytest_v2 seaborn sympy matplotlib astroid flask marshmallow pvlib pyvista
    sqlfluff xarray pydicom requests pylint astropy scikit sphinx calypso bpmn_js carbon eslint grommet
    highlightjs lighthouse next openlayers prismjs quarto_cli chart_js marked p5js react_pdf jest jest_json
    vitest karma tap immutable_js redis jq doctest micropython_test googletest gotest maven ant gradle_custom
    phpunit minitest cucumber ruby_unit rspec_transformed_json jekyll cargo
"""
LOG_PARSERS: Final = frozenset(f"{_PREFIX}{name}" for name in _NAMES.split())

UP_TO_A_BLANK: Final = frozenset(
    f"{_PREFIX}{name}"
    for name in (
        *("pytest", "pytest_options", "seaborn", "matplotlib", "astroid", "flask", "marshmallow", "pvlib"),
        *("pyvista", "sqlfluff", "xarray", "pydicom", "requests", "pylint"),
    )
)
"""Parsers that read a test's id up to the first blank."""


def log_parser(name: str) -> str:
    """The full name of a log parser, which data sets may give without ``parse_log_``. Raises ValueError."""
    for found in (name, f"{_PREFIX}{name}"):
        if found in LOG_PARSERS:
            return found
    near = get_close_matches(name.removeprefix(_PREFIX), _NAMES.split(), n=3)
    shown = ", ".join(f"{_PREFIX}{one}" for one in near or sorted(_NAMES.split()))
    which = f"nearest are {shown}" if near else f"it has {shown}"
    raise ValueError(f"{SWEBENCH.requirement} has no log parser {name!r:.80}; {which}")
