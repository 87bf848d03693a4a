"""What the tests of all steps share: the sums that are right, and the reward file."""

import csv
import json
from pathlib import Path

APP = Path("/app")


def totals() -> dict[str, int]:
    """Amounts by month, of the file as it is now."""
    found: dict[str, int] = {}
    with (APP / "sales.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found[row["month"]] = found.get(row["month"], 0) + int(row["amount"])
    return found


def said(name: str) -> str:
    file = APP / name
    return file.read_text().strip() if file.is_file() else ""


def reward(**numbers: float) -> None:
    Path("/logs/verifier/reward.json").write_text(json.dumps(numbers))
