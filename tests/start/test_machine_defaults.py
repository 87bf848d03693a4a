"""How many episodes, gradings and sandboxes a server takes by default: by the machine's cores and memory."""

from __future__ import annotations

import pytest

from turnstile_server.episodes.places import beyond_places
from turnstile_server.settings import Settings
from turnstile_server.settings.machine import (
    default_episodes,
    default_gradings,
    default_sandboxes,
    machine_resources,
)

GIB = 1024


@pytest.mark.parametrize(
    ("cpus", "memory_mb", "episodes"),
    [
        (2, 24 * GIB, 16),  # by its cores
        (8, 16 * GIB, 24),  # by its memory
        (1, 1 * GIB, 4),  # the fewest
        (32, 128 * GIB, 192),
        (128, 1024 * GIB, 256),  # the most for one server
    ],
)
def test_a_machine_has_places_by_its_cores_and_its_memory(cpus: int, memory_mb: int, episodes: int) -> None:
    resources = {"cpus": float(cpus), "memory_mb": float(memory_mb)}
    assert default_episodes(resources) == episodes
    assert default_sandboxes(resources) >= max(128, episodes + 2 * default_gradings(resources))


def test_a_server_takes_the_defaults_of_its_machine_and_gradings_need_no_place_of_an_episode() -> None:
    settings, resources = Settings(), machine_resources()
    assert settings.episodes.places == default_episodes(resources)
    assert settings.sandboxes.places == default_sandboxes(resources)
    assert settings.grading.places == default_gradings(resources)
    assert beyond_places(settings) == settings.episodes.places
    chosen = Settings(episodes={"max_running": 3}, sandboxes={"max_open": 5})
    assert (chosen.episodes.places, chosen.sandboxes.places) == (3, 5)
