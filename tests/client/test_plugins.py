"""Parts of packages by name: what is found, whose name counts, and what is said of a part that cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from installed_plugins import declare
from turnstile.plugins import GROUPS, BrokenPlugin, Plugins, UnknownPlugin, is_reference

ENGINES = "turnstile.engines"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of ``sys.path`` with a module of parts."""
    (tmp_path / "acme_parts.py").write_text("class Part:\n    make = staticmethod(lambda: 7)\n\nVALUE = 1\n")
    (tmp_path / "acme_failing.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "acme_leaving.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for module in ("acme_parts", "acme_failing", "acme_leaving"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize("group", GROUPS)
def test_every_part_that_ships_can_be_loaded(group: str) -> None:
    ours = [plugin for plugin in Plugins(group).declared() if plugin.ours]
    assert ours, f"{group}: none; install this checkout again (make install)"
    for plugin in ours:
        assert plugin.load() is not None


def test_a_declared_part_is_found_by_its_name_behind_those_that_ship(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, site, ENGINES, acme="acme_parts:Part.make")
    engines = Plugins(ENGINES)
    assert engines.names() == ("embedded", "sglang", "trainer", "upstream", "vllm", "acme")
    found = engines.find("acme")
    assert (found.distribution, found.target, found.ours) == ("acme-parts 1.2", "acme_parts:Part.make", False)
    assert "acme_parts" not in sys.modules, "a name is read without its code"
    assert found.create(int) == 7
    with pytest.raises(BrokenPlugin, match="it is a int, and no str"):
        found.create(str)


def test_a_reference_needs_no_declaration(site: Path) -> None:
    assert Plugins(ENGINES).load("acme_parts:VALUE") == 1
    assert is_reference("a.b_c:D.e")
    for text in ("sglang", "a:", ":b", "a b:c", "./a.py:b", "a.py:b c", "rows:/data", "a:b=c", "1a:b"):
        assert not is_reference(text), text


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UnknownPlugin, match=r"no engine 'acme'; there are embedded, .*, package\.module:object"):
        Plugins(ENGINES).find("acme")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("acme_absent:Part", "ModuleNotFoundError: No module named 'acme_absent'"),
        ("acme_parts:Nobody", "AttributeError: .*Nobody"),
        ("acme_failing:Part", "RuntimeError: no licence"),
        ("acme_leaving:Part", "SystemExit: 3"),
        ("acme_parts", "AttributeError"),
    ],
)
def test_a_part_that_cannot_be_loaded_names_its_package_and_the_error(
    site: Path, monkeypatch: pytest.MonkeyPatch, target: str, said: str
) -> None:
    declare(monkeypatch, site, ENGINES, acme=target)
    with pytest.raises(
        BrokenPlugin, match=rf"the engine 'acme' \(acme-parts 1\.2, {target}\) cannot be loaded: {said}"
    ):
        Plugins(ENGINES).load("acme")


def test_a_name_that_ships_stays_turnstiles(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, site, ENGINES, sglang="acme_parts:Part")
    engines = Plugins(ENGINES)
    assert engines.find("sglang").ours
    assert [plugin.name for plugin in engines.usable() if not plugin.ours] == []
    (theirs,) = [plugin for plugin in engines.declared() if not plugin.ours]
    with pytest.raises(
        BrokenPlugin, match="is not used: Turnstile declares the name 'sglang' too; write acme_parts:Part"
    ):
        theirs.load()


def test_a_name_of_two_packages_belongs_to_neither(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, site, ENGINES, "acme-parts", acme="acme_parts:Part")
    declare(monkeypatch, site, ENGINES, "bolt-parts", acme="acme_parts:VALUE")
    engines = Plugins(ENGINES)
    assert "acme" not in engines.names()
    with pytest.raises(BrokenPlugin, match="another package declares the name 'acme' too"):
        engines.load("acme")
