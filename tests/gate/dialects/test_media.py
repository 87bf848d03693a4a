"""Pictures, documents, sound and films, which the model is not shown: a text in their place, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conversation import raw, reply_ids
from gate_support import Stage, says, staged
from one_dialogue import CLIENTS, Client, Result
from test_one_dialogue import REPLIES

from turnstile_server.errors import ImagesNotServed
from turnstile_server.gate.dialects.anthropic import AnthropicDialect
from turnstile_server.gate.dialects.base import BodyContext, Dialect
from turnstile_server.gate.dialects.chat import ChatDialect
from turnstile_server.gate.dialects.gemini import GeminiDialect
from turnstile_server.gate.dialects.media import Media, media_kind
from turnstile_server.gate.dialects.parse_cache import ParseCache
from turnstile_server.gate.dialects.responses import ResponsesDialect
from turnstile_server.rendering.media_words import OMITTED
from waiting import wait_until

pytestmark = pytest.mark.anyio
Wire = dict[str, Any]
PNG = "iVBORw0KGgo="
URL = f"data:image/png;base64,{PNG}"
DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect for dialect in (ChatDialect(), ResponsesDialect(), AnthropicDialect(), GeminiDialect())
}

PARTS: Mapping[str, Mapping[str, list[Wire]]] = {
    "chat": {
        "image": [{"type": "image_url", "image_url": {"url": URL}}],
        "audio": [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}],
        "video": [{"type": "video_url", "video_url": {"url": "https://x/y.mp4"}}],
        "document": [{"type": "file", "file": {"file_data": "data:application/pdf;base64,AA==", "filename": "a"}}],
    },
    "responses": {
        "image": [{"type": "input_image", "image_url": URL, "detail": "auto"}],
        "audio": [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}],
        "document": [{"type": "input_file", "file_data": "AA==", "filename": "a.pdf"}, {"type": "input_file"}],
    },
    "anthropic": {
        "image": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
            {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
        ],
        "document": [
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
        ],
    },
    "gemini": {
        "image": [
            {"inlineData": {"mimeType": "image/png", "data": PNG}},
            {"file_data": {"mime_type": "image/webp"}},
        ],
        "audio": [{"inlineData": {"mimeType": "audio/wav", "data": "AA=="}}],
        "video": [{"fileData": {"mimeType": "video/mp4", "fileUri": "x"}}],
        "document": [{"inlineData": {"mimeType": "application/pdf", "data": "AA=="}}, {"fileData": {}}],
    },
}
"""The parts of each kind, by dialect."""

CASES = [
    (dialect, kind, part) for dialect, kinds in PARTS.items() for kind, parts in kinds.items() for part in parts
]


def in_user(dialect: str, part: Wire) -> Wire:
    """A user's item: a text, the part, a text."""
    text = {"chat": "text", "responses": "input_text", "anthropic": "text"}.get(dialect)
    if text is None:
        return {"role": "user", "parts": [{"text": "see "}, part, {"text": " here"}]}
    return {"role": "user", "content": [{"type": text, "text": "see "}, part, {"type": text, "text": " here"}]}


def in_result(dialect: str, part: Wire, call_id: str, name: str = "bash") -> Wire:
    """A tool's item: a text and the part."""
    match dialect:
        case "chat":
            return {"role": "tool", "tool_call_id": call_id, "content": [{"type": "text", "text": "see "}, part]}
        case "responses":
            output = [{"type": "input_text", "text": "see "}, part]
            return {"type": "function_call_output", "call_id": call_id, "output": output}
        case "anthropic":
            content = [{"type": "text", "text": "see "}, part]
            return {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call_id, "content": content}],
            }
    response = {"id": call_id, "name": name, "response": {"output": "see "}, "parts": [part]}
    return {"role": "user", "parts": [{"functionResponse": response}]}


def body(dialect: str, *items: Wire) -> bytes:
    history = DIALECTS[dialect].history
    return json.dumps({"model": "m", "max_tokens": 9, history: list(items)}).encode()


@pytest.mark.parametrize(("dialect", "kind", "part"), CASES)
def test_a_part_is_a_text_in_its_place(dialect: str, kind: str, part: Wire) -> None:
    user, result = in_user(dialect, part), in_result(dialect, part, "call_1")
    asked = DIALECTS[dialect].parse(
        body(dialect, user, result), BodyContext(params={"model": "m"}, media=Media(OMITTED))
    )
    first, second = asked.messages
    assert (first.role, first.content, first.omitted) == ("user", f"see [{kind} omitted] here", (kind,))
    assert (second.role, second.content, second.omitted) == ("tool", f"see [{kind} omitted]", (kind,))
    for one in (user, result):
        with pytest.raises(ImagesNotServed, match=rf"gate\.images = refuse.*\(here: {kind}\)"):
            DIALECTS[dialect].parse(body(dialect, one), BodyContext(params={"model": "m"}))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_body_that_continues_gives_what_reading_all_of_it_gives(dialect: str) -> None:
    media, cache = Media(OMITTED), ParseCache()
    parts = [part for parts in PARTS[dialect].values() for part in parts]
    items = [item for part in parts for item in (in_user(dialect, part), in_result(dialect, part, "call_1"))]
    for count in range(1, len(items) + 1):
        data = body(dialect, *items[:count])
        continued = DIALECTS[dialect].parse(data, BodyContext(cache, {"model": "m"}, media))
        assert continued == DIALECTS[dialect].parse(data, BodyContext(None, {"model": "m"}, media))
    assert cache.continued == len(items) - 1


def test_a_document_that_is_text_is_read() -> None:
    block = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "its words"}}
    [message] = AnthropicDialect().parse(body("anthropic", {"role": "user", "content": [block]})).messages
    assert (message.content, message.omitted) == ("its words", ())


@pytest.mark.parametrize("mime", [None, 3, "", "text/plain", "application/pdf", "nonsense"])
def test_what_is_no_picture_sound_or_film_is_a_document(mime: object) -> None:
    assert media_kind(mime) == "document"


async def speak(stage: Stage, client: Client, *, pictured: bool = True) -> dict[str, Any]:
    """A dialogue of five turns with a picture in each input; ``pictured`` False: with its text alone."""
    stage.engine.answers = [says(reply_ids(stage, text)) for text in REPLIES]
    episode = await stage.episode()
    picture = PARTS[client.dialect]["image"][0]

    def ask_user() -> None:
        if pictured:
            client.history.append(in_user(client.dialect, picture))
        else:
            client.user("see [image omitted] here")

    def answer(call_id: str) -> None:
        if pictured:
            client.history.append(in_result(client.dialect, picture, call_id))
        else:
            client.results([Result(call_id, "bash", "see [image omitted]")])

    async with raw(episode) as http:
        ask_user()
        for _ in range(2):
            for call_id in await client.ask(http, episode["model_url"]):
                answer(call_id)
        for _ in range(2):
            assert await client.ask(http, episode["model_url"]) == []
            ask_user()
        await client.ask(http, episode["model_url"])
    samples = await stage.get(episode, "/samples")
    turns = (await stage.get(episode, "/turns"))["turns"]
    return {"samples": samples["samples"], "stats": samples["stats"], "turns": turns}


async def test_a_conversation_with_pictures_is_one_path_and_they_are_counted(stage: Stage) -> None:
    plain = await speak(stage, CLIENTS[0](), pictured=False)
    for made in CLIENTS:
        heard = await speak(stage, made())
        assert (heard["stats"]["breaks"], heard["stats"]["roots"]) == ({}, 1), made.dialect
        assert heard["stats"]["cosmetic"].pop("image_omitted") == 6, made.dialect
        assert heard["stats"]["trained_tokens"] == heard["stats"]["sampled_tokens"] > 0
        [sample], [expected] = heard["samples"], plain["samples"]
        for field in ("input_ids", "loss_mask", "logprobs"):
            assert sample[field] == expected[field], (made.dialect, field)
        omitted = [[message["omitted"] for message in turn["new_messages"]] for turn in heard["turns"]]
        expected_images = [[["image"]], [["image"]], [["image"], ["image"]], [["image"]], [["image"]]]
        assert [[one for one in turn if one] for turn in omitted] == expected_images
    assert "image_omitted" not in plain["stats"]["cosmetic"]
    shown = (await stage.control.get("/metrics")).text
    assert 'kind="image_omitted"' in shown


async def test_a_refusal_is_the_fault_of_the_set_up_also_after_a_turn(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"images": "refuse"}) as stage:
        stage.engine.answers = [says(reply_ids(stage, "go on"))]
        episode = await stage.episode()
        picture = in_user("chat", PARTS["chat"]["image"][0])
        text = {"role": "user", "content": "go"}
        async with raw(episode) as http:
            url = f"{episode['model_url']}/v1/chat/completions"
            assert (await http.post(url, json={"messages": [text]})).status_code == 200
            refused = await http.post(url, json={"messages": [text, picture]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "images_not_served")
        assert "messages[1].content[1]" in refused.json()["error"]["message"]
        ended: dict[str, Any] = {}

        async def has_ended() -> bool:
            ended.update(await stage.get(episode))
            return bool(ended["status"] != "running")

        await wait_until(has_ended)
        assert (ended["status"], ended["reward"]) == ("failed", None)
        assert (ended["error"]["type"], ended["error"]["fault"]) == ("images_not_served", "setup")
        assert "gate.images" in ended["error"]["message"]
