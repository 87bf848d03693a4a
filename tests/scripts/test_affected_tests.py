"""`make check` finds the tests of a change by imports: no module of the product is without."""

from __future__ import annotations

from pathlib import Path

import pytest

from affected_tests import PRODUCT, distances, modules_of
from test_sources import ROOT, certain_markers, possible_markers, source

TESTS = ROOT / "tests"


def nearest(path: str) -> set[str]:
    found = distances([path])
    return {
        test.relative_to(TESTS).as_posix() for test, distance in found.items() if distance == min(found.values())
    }


@pytest.mark.slow
def test_every_file_of_the_product_leads_to_a_test() -> None:
    files = [path for folder in PRODUCT.values() for path in folder.rglob("*.py")]
    assert len(files) > 500
    assert [path for path in files if not modules_of(path.relative_to(ROOT).as_posix())] == []


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("env_server/turnstile_server/workers/placement.py", "workers/test_worker_placement.py"),
        ("env_server/turnstile_server/rendering/repeat_encoder.py", "rendering/test_repeat_encoder.py"),
        ("tests/control_support.py", "control/test_control_api.py"),
        ("tests/capture/test_retry.py", "capture/test_retry.py"),
        ("docs/matching.md", "capture/test_match_rules.py"),
        ("scripts/image_packages.py", "scripts/test_image_packages.py"),
    ],
)
def test_the_nearest_tests_are_those_that_use_or_name_what_changed(changed: str, test: str) -> None:
    assert (ROOT / changed).exists()
    assert test in nearest(changed)


def test_a_part_that_an_entry_point_names_leads_to_the_tests_of_what_loads_it() -> None:
    found = distances(["env_server/turnstile_server/kinds/r2e/rows.py"])
    assert TESTS / "tasks" / "test_r2e_rows.py" in found


def test_a_module_that_is_loaded_by_name_stands_for_its_package() -> None:
    found = modules_of("env_server/turnstile_server/engines/embedded/worker.py")
    assert "turnstile_server.engines.embedded.worker" in found
    assert len(found) > 1


def test_markers_come_from_the_module_from_fixtures_that_it_uses_and_from_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "room"
    folder.mkdir()
    (folder / "conftest.py").write_text(
        "KINDS = []\nif True:\n    KINDS.append(pytest.param('far', marks=pytest.mark.docker))\n\n\n"
        "@pytest.fixture(params=KINDS)\ndef place(request):\n    return request.param\n"
    )
    (folder / "test_near.py").write_text("pytestmark = [pytest.mark.slow]\n\n\ndef test_it():\n    pass\n")
    (folder / "test_far.py").write_text("def test_it(place):\n    pass\n")
    monkeypatch.setattr("test_sources.TESTS", tmp_path)
    assert possible_markers(folder / "test_near.py") == {"slow"}
    assert certain_markers(folder / "test_near.py") == {"slow"}
    assert possible_markers(folder / "test_far.py") == {"docker"}
    assert certain_markers(folder / "test_far.py") == set()
    assert "place" in source(folder / "test_far.py").words
