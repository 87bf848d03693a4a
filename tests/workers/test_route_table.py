"""Every route of the control API has a line in the table that says what several workers do with it."""

from __future__ import annotations

import pytest

from turnstile_server.settings import Settings
from turnstile_server.testing.policy import Step
from turnstile_server.testing.server import scripted_server
from turnstile_server.workers.route_table import ROUTES, Way, route_of

pytestmark = pytest.mark.anyio


async def test_the_table_has_the_routes_of_a_server_and_no_others() -> None:
    async with scripted_server(Settings(sandboxes={"kind": "none"}), lambda _: Step(text="x")) as server:
        described = (await server.control.get("/openapi.json")).json()["paths"]
    served = {(method.upper(), path) for path, methods in described.items() for method in methods}
    assert served == set(ROUTES)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_a_path_has_the_line_of_its_own_template(method: str) -> None:
    for known, template in ROUTES:
        if known == method:
            path = template.replace("{episode_id}", "ep_1").replace("{", "").replace("}", "")
            found = route_of(method, path)
            assert (found.template, found.way) == (template, ROUTES[known, template])
            assert found.episode_id == ("ep_1" if "{episode_id}" in template else None)


async def test_what_has_no_line_goes_to_any_worker_which_refuses_it() -> None:
    assert route_of("PATCH", "/episodes").way is Way.ANY
    assert route_of("GET", "/episodes/ep_1/no-such").way is Way.ANY
    assert route_of("POST", "/engine/sleep").way is Way.REFUSED
