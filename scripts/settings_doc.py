"""Write docs/settings.md from the descriptions in the settings, so that the two cannot disagree.

python scripts/settings_doc.py            # write
python scripts/settings_doc.py --check    # exit 1 when the page is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from turnstile.models import Limits, Sampling
from turnstile_server.settings import Section, Settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"

HEAD = """\
# Settings

Made by `scripts/settings_doc.py` from the classes in `turnstile_server/settings/`; do not edit.

A flag of `turnstile serve` wins over an environment variable, the variable over the file given with `--config`
(TOML), and the file over the default. `gate.max_body_bytes` is `TURNSTILE_GATE__MAX_BODY_BYTES` in the environment
and, in the file:

```toml
[gate]
max_body_bytes = 33554432
```

Times are seconds, sizes are bytes. Bounds that nobody has asked to change are no settings but constants, in the
`bounds.py` of the package that reads them. An impossible value stops the server at start with exit code 2 and the
name of the setting.
"""


def page() -> str:
    lines = [HEAD, "## Server", "", *_table("", Settings)]
    for name, field in Settings.model_fields.items():
        section = _model(field)
        if section is not None and issubclass(section, Section):
            lines += [f"## `{name}`", "", _about(section), "", *_table(f"{name}.", section)]
    lines += [
        "## `sampling`",
        "",
        "The trainer pins the sampling of all model calls. An episode may set its own.",
        "",
    ]
    lines += _table("sampling.", Sampling)
    lines += [
        "## `limits` of an episode",
        "",
        "The field `limits` of `POST /episodes`. The ceilings are in `episodes`.",
        "",
    ]
    lines += _table("limits.", Limits)
    return "\n".join(lines).rstrip() + "\n"


def _about(section: type[Section]) -> str:
    return (section.__doc__ or "").split("\n\n")[0]


def _table(prefix: str, model: type[BaseModel]) -> list[str]:
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        section = _model(field)
        if section is not None or field.exclude:  # a section, or what only code can give
            continue
        default = field.get_default(call_default_factory=True)
        shown = "none" if default is None else f"`{default}`"
        rows.append(f"| `{prefix}{name}` | {shown} | {field.description} |")
    return [*rows, ""]


def _model(field: FieldInfo) -> type[BaseModel] | None:
    annotation: Any = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def main() -> int:
    wanted = page()
    if "--check" in sys.argv[1:]:
        if PAGE.exists() and PAGE.read_text() == wanted:
            return 0
        sys.stderr.write("docs/settings.md is out of date: run scripts/settings_doc.py\n")
        return 1
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
