"""The table of docs/models.md: what is exact with each model folder of a folder of them.

python scripts/models_doc.py FOLDER          prints the table
python scripts/models_doc.py FOLDER --write  puts it into docs/models.md
"""

from __future__ import annotations

import argparse
import re
from html import escape
from pathlib import Path

from turnstile_server.errors import StartupError
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.settings import RenderingSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BETWEEN = re.compile(r"(<!-- models -->\n).*(<!-- /models -->)", re.DOTALL)


def row(folder: Path) -> str:
    """A row of the table. A folder that no server starts with says why."""
    try:
        report = create_renderer(folder, RenderingSettings()).report
    except StartupError as error:
        return f"| {folder.name} | – | | | does not start: {error.message} |"
    thinking = f"`{report.thinking}`" if report.thinking else ""
    inexact = escape("; ".join(report.inexact), quote=False).replace("|", "\\|")
    cells = (
        folder.name,
        f"`{report.call_format}`" if report.call_format else "–",
        thinking.replace("|", "\\|"),
        ", ".join(report.rewrites),
        inexact,
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--write", action="store_true")
    chosen = arguments.parse_args()
    lines = ["| model | calls | thinking | messages written differently | not exact |", "|---|---|---|---|---|"]
    lines += [row(each) for each in sorted(chosen.folder.iterdir()) if (each / "tokenizer.json").is_file()]
    table = "\n".join(lines)
    if not chosen.write:
        print(table)
        return
    PAGE.write_text(BETWEEN.sub(lambda found: f"{found[1]}{table}\n{found[2]}", PAGE.read_text()))


if __name__ == "__main__":
    main()
