"""Lints and renders a Helm chart, and holds objects against Kubernetes' schemas: no field that is not theirs.

    scripts/install_pinned.sh scripts/chart-tools.txt DIR
    echo '{"chart": "deploy/helm/turnstile", "values": [{}], "objects": []}' > asked.json
    DIR/bin/python scripts/check_chart.py < asked.json

Reads and writes JSON; ``values``: sets of values, each rendered as release ``t`` in namespace ``ns``; ``objects``:
further ones that are validated; ``schemas``: the ``openAPIV3Schema`` of each kind that is not Kubernetes' own, in
which a pod's ``spec`` is held against Kubernetes'. The answer: ``lint`` (messages), ``rendered`` (for each set its
objects, or ``error``), ``invalid`` (sentences). It imports nothing of Turnstile, and speaks to no cluster.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import kubernetes_validate  # type: ignore[import-not-found, unused-ignore]
import yaml
from helm_python import Chart, HelmError, lint  # type: ignore[import-not-found, unused-ignore]

INFORMATION = 1
"""Severity of a finding that asks for nothing, such as a missing icon."""
VERSIONS = ("1.30", "1.37")
"""The first that the server works with, and the newest that is known."""


def rendered(chart: Any, values: dict[str, Any]) -> Any:
    try:
        files = chart.render(values, name="t", namespace="ns")
    except HelmError as error:
        return {"error": str(error)}
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def invalid(thing: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    found: list[str] = []
    if (schema := schemas.get(thing.get("kind", ""))) is not None:
        name = f"{thing['kind']} {thing['metadata'].get('name')}"
        found += [
            f"{name}: {each.message}"
            for each in jsonschema.Draft202012Validator(closed(schema)).iter_errors(thing)
        ]
        if (pod := thing["spec"].get("podTemplate")) is None:
            return found
        about = {"name": thing["metadata"]["name"], **pod["metadata"]}
        thing = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": pod["spec"]}
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(thing, version, strict=True)
        except Exception as error:  # noqa: BLE001 - each of its errors is a sentence of the answer
            found.append(
                f"{thing.get('kind')} {thing['metadata'].get('name')}, {version}: {str(error).splitlines()[0]}"
            )
    return found


def closed(schema: dict[str, Any], *, top: bool = True) -> dict[str, Any]:
    """Without room for a field that is not named; the API server would drop it."""
    if "properties" not in schema:
        return {**schema, "items": closed(schema["items"], top=False)} if "items" in schema else schema
    fields = {
        name: each if top and name == "metadata" else closed(each, top=False)
        for name, each in schema["properties"].items()
    }
    return {**schema, "properties": fields, "additionalProperties": False}


def findings(path: str, values: dict[str, Any]) -> list[str]:
    """Warnings and errors."""
    report = lint(path, values, strict=True, namespace="ns", kube_version=f"v{VERSIONS[0]}.0")
    return [each["error"] for each in report["messages"] if each["severity"] > INFORMATION]


def main() -> None:
    asked = json.load(sys.stdin)
    path = asked["chart"]
    with Chart.load(path) as chart:
        sets = [rendered(chart, values) for values in asked["values"]]
    found = [sentence for values in asked["values"] for sentence in findings(path, values)]
    things = [*asked["objects"], *(each for objects in sets if isinstance(objects, list) for each in objects)]
    wrong = [sentence for each in things for sentence in invalid(each, asked["schemas"])]
    json.dump({"lint": found, "rendered": sets, "invalid": wrong}, sys.stdout)


if __name__ == "__main__":
    main()
