"""Messages that a chat template would drop, move or refuse keep their text and their place.

The templates here do what models' own do: Qwen 3.5 refuses late system text, MiniMax drops it, DeepSeek hoists it,
R1 keeps the last system message alone, Mistral wants user and assistant in turns, Gemma 2 takes no system message.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_models import ids_of, make_folder

from products import examples
from turnstile.models import Message
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Bridge, PathEnd
from turnstile_server.rendering.template import TemplateRenderer
from turnstile_server.settings import RenderingSettings

pytestmark = pytest.mark.slow

TURN = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LATE = "message.role == 'system' and not loop.first"
KNOWN = "message.role in ['system', 'user', 'assistant', 'tool']"


def loop(body: str) -> str:
    return "{% for message in messages %}" + body + "{% endfor %}" + PROMPT


TEMPLATES = {
    "keeps": loop(TURN),
    "drops": loop("{% if KNOWN and not (LATE) %}TURN{% endif %}"),
    "refuses": loop("{% if LATE or not (KNOWN) %}{{ raise_exception('not first') }}{% endif %}TURN"),
    "hoists": "{% for message in messages %}{% if message.role == 'system' %}TURN{% endif %}{% endfor %}"
    + loop("{% if KNOWN and message.role != 'system' %}TURN{% endif %}"),
    "keeps the last system": "{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message.role == 'system' %}{% set ns.system = message.content %}{% endif %}{% endfor %}{{ ns.system }}"
    + loop("{% if KNOWN and message.role != 'system' %}TURN{% endif %}"),
    "wants turns": "{% set ns = namespace(user=false) %}"
    + loop(
        "{% if message.role == 'user' %}{% if ns.user %}{{ raise_exception('turns') }}{% endif %}"
        "{% set ns.user = true %}{% elif message.role == 'assistant' %}{% set ns.user = false %}"
        "{% elif message.role == 'tool' %}{% set ns.user = true %}"
        "{% elif not loop.first or message.role != 'system' %}{{ raise_exception('role') }}{% endif %}TURN"
    ),
    "no system": "{% set ns = namespace(user=false) %}"
    + loop(
        "{% if message.role == 'user' and ns.user or message.role not in ['user', 'assistant', 'tool'] %}"
        "{{ raise_exception('role') }}{% endif %}{% set ns.user = message.role == 'user' %}TURN"
    ),
}


@pytest.fixture(scope="module")
def subject(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TemplateRenderer]:
    root, made = tmp_path_factory.mktemp("rules"), dict[str, TemplateRenderer]()

    def make(name: str) -> TemplateRenderer:
        if name not in made:
            text = TEMPLATES[name].replace("TURN", TURN).replace("LATE", LATE).replace("KNOWN", KNOWN)
            built = create_renderer(
                make_folder(tiny_model, root / name.replace(" ", "_"), text), RenderingSettings()
            )
            assert isinstance(built, TemplateRenderer)
            made[name] = built
        return made[name]

    return make


ROLES = st.sampled_from(["system", "developer", "user"])
GROUPS = st.lists(st.lists(ROLES, min_size=1, max_size=3), min_size=1, max_size=4)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(40), deadline=None)
@given(groups=GROUPS)
def test_every_text_is_in_its_place_and_a_continuation_is_what_a_whole_render_has(
    subject: Callable[[str], TemplateRenderer], name: str, groups: list[list[str]]
) -> None:
    renderer = subject(name)
    messages: list[Message] = [Message("user", "text 0 begins")] if groups[0][-1] != "user" else []
    path = np.array([], dtype=np.int32)
    for number, roles in enumerate(groups):
        new = [Message(role, f"text {number} {index} ends") for index, role in enumerate(roles)]  # type: ignore[arg-type]
        if number == 0:
            new = [*new, *messages]
            messages = new
            path = renderer.render(messages, []).ids
            continue
        completion = ids_of(renderer, f"reply {number}<|im_end|>")
        reply = Message("assistant", f"reply {number}")
        bridge = renderer.bridge(PathEnd(path[-64:], completion, reply, "stop"), new, [])
        assert isinstance(bridge, Bridge), bridge
        path = np.concatenate([path, completion, bridge.context_ids])
        messages = [*messages, reply, *new]
    whole = renderer.decode(renderer.render(messages, []).ids)
    assert renderer.decode(path) == whole
    places = [whole.find(message.content) for message in messages]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("name", "roles", "used"),
    [
        ("keeps", ["system", "system", "user", "user", "system"], set()),
        ("drops", ["user", "system"], {"system_as_user"}),
        ("drops", ["system", "system", "user"], {"system_joined"}),
        ("drops", ["developer", "user"], {"developer_as_system"}),
        ("refuses", ["user", "developer"], {"system_as_user"}),
        ("hoists", ["user", "system", "user"], {"system_as_user"}),
        ("keeps the last system", ["system", "system", "user"], {"system_joined"}),
        ("wants turns", ["user", "user"], {"users_joined"}),
        ("wants turns", ["user", "tool", "user"], {"user_behind_result"}),
        ("no system", ["system", "user"], {"system_as_user", "users_joined"}),
    ],
)
def test_what_is_written_differently_is_counted_by_name(
    subject: Callable[[str], TemplateRenderer], name: str, roles: list[str], used: set[str]
) -> None:
    messages = [Message(role, f"text {index}") for index, role in enumerate(roles)]  # type: ignore[arg-type]
    if "tool" in roles:
        messages.insert(1, Message("assistant", "reply"))
    assert subject(name).render(messages, []).rewritten == used
