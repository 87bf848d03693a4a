"""Writes a number for each part of the summary; the reward is their mean."""

import json

EXPECTED = {"count": 4, "total": 46.99, "by_customer": {"a": 30, "b": 0.99, "c": 16}}
try:
    with open("summary.json") as file:
        found = json.load(file)
except (OSError, ValueError):
    found = {}
parts = {name: found.get(name) == wanted for name, wanted in EXPECTED.items()}
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": sum(parts.values()) / len(parts), **parts}, file)
