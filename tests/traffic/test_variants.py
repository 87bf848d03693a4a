"""The specs that the matrix changes still have what it changes."""

from __future__ import annotations

import pytest
import yaml

from agents_matrix.variants import ENVIRONMENT, VARIANTS, variant
from turnstile_server.agents.shipped import SPECS
from turnstile_server.agents.spec import AgentSpec

PAIRS = sorted(
    {(fault, agent) for table in (VARIANTS, ENVIRONMENT) for fault, agents in table.items() for agent in agents}
)


@pytest.mark.parametrize(("fault", "agent"), PAIRS)
def test_a_variant_is_a_valid_spec_that_differs_in_the_command_or_the_files(fault: str, agent: str) -> None:
    shipped = yaml.safe_load((SPECS / f"{agent}.yaml").read_text("utf-8"))
    changed = variant(fault, agent, shipped)
    assert changed is not None
    before, after = AgentSpec.model_validate(shipped), AgentSpec.model_validate(changed)
    assert (before.command, before.files, before.env) != (after.command, after.files, after.env)
    assert before.install == after.install
