"""The wire parser on what a real SGLang sent, and on what it must never accept."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import RID, frames, recording, sse, whole

from turnstile_server.engines.prompt_json import ids_json
from turnstile_server.engines.protocol import EngineChunk, EngineSampling
from turnstile_server.engines.replies import SseSplitter, error_for_status
from turnstile_server.engines.sglang.calls import LiveCall
from turnstile_server.engines.sglang.generate import ReplyReader, generate_body, meta_of
from turnstile_server.engines.sglang.score import chosen_logprob, input_logprobs
from turnstile_server.errors import EngineProtocolError, EngineRefused, EngineUnavailable, TurnstileError

VOCAB = 4160


def read_all(payloads: list[dict[str, Any]]) -> list[EngineChunk]:
    reader = ReplyReader(RID, "default")
    return [chunk for payload in payloads if (chunk := reader.read(payload)) is not None]


def tokens(chunks: list[EngineChunk]) -> tuple[list[int], list[float]]:
    return np.concatenate([c.ids for c in chunks]).tolist(), np.concatenate([c.logprobs for c in chunks]).tolist()


@pytest.mark.parametrize("style", ["cumulative", "incremental"])
def test_both_recorded_chunk_styles_give_each_token_once(style: str) -> None:
    chunks = read_all(frames(f"stream_length_{style}"))
    ids, logprobs = tokens(chunks)
    final = whole("whole_length")
    assert ids == final["output_ids"]
    expected = [entry[0] for entry in final["meta_info"]["output_token_logprobs"]]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize(
    ("name", "reason", "count"),
    [
        ("whole_length", "length", 4),
        ("whole_stop_token", "stop", 2),
        ("whole_stop_string", "stop", 4),
        ("whole_two_weights", "length", 60),
    ],
)
def test_recorded_whole_replies_are_read(name: str, reason: str, count: int) -> None:
    (chunk,) = read_all([whole(name)])
    assert chunk.finish is not None
    assert (chunk.finish.reason, len(chunk.ids)) == (reason, count)
    assert chunk.finish.matched == whole(name)["meta_info"]["finish_reason"].get("matched")


def test_recorded_spans_say_where_the_weights_changed() -> None:
    (chunk,) = read_all([whole("whole_two_weights")])
    assert chunk.finish is not None
    old, new = chunk.finish.weight_spans
    assert (old.version, new.version, old.end, new.start, new.end) == ("default", "v2", new.start, old.end, 60)


@pytest.mark.parametrize("style", ["cumulative", "incremental"])
def test_each_chunk_names_the_weights_of_its_tokens(style: str) -> None:
    assert [chunk.weight_version for chunk in read_all(frames(f"stream_length_{style}"))] == ["default"] * 4


@pytest.mark.parametrize("style", ["cumulative", "incremental"])
def test_tokens_that_may_be_older_than_the_version_of_their_chunk_have_no_version(style: str) -> None:
    """A chunk names the weights served when it was sent: its tokens may have been sampled before an update."""
    payloads = frames(f"stream_length_{style}")
    for payload in payloads[1:]:
        payload[META]["weight_version"] = "v2"
    versions = [chunk.weight_version for chunk in read_all(payloads)]
    # On a busy machine two tokens waited to be sent. The last chunk has spans of its own.
    assert versions == ["default", None, None, "default"]
    first_of_a_call_sent_under_other_weights = ReplyReader(RID, "v0").read(payloads[0])
    assert first_of_a_call_sent_under_other_weights is not None
    assert first_of_a_call_sent_under_other_weights.weight_version is None


@pytest.mark.parametrize("reduced", ["no weights", "no tokens"])
def test_an_abort_that_says_less_than_the_chunks_before_it_takes_its_weights_from_them(reduced: str) -> None:
    """A running call that a pause puts back into the queue is aborted there, with a reduced meta_info."""
    payloads = [*frames("stream_length_incremental")[:3], frames("stream_abort_waiting_incremental")[0]]
    if reduced == "no weights":
        del payloads[-1][META]["weight_version"], payloads[-1][META]["weight_versions"]
    chunks = read_all(payloads)
    assert len(tokens(chunks)[0]) == 3
    finish = chunks[-1].finish
    assert finish is not None
    assert finish.reason == "abort"
    assert [(span.start, span.end, span.version) for span in finish.weight_spans] == [(0, 3, "default")]


def test_a_recorded_abort_keeps_its_tokens() -> None:
    payload = whole("whole_abort_cumulative")
    (chunk,) = read_all([payload])
    assert chunk.finish is not None
    assert chunk.finish.reason == "abort"
    assert len(chunk.ids) == payload["meta_info"]["completion_tokens"] > 0


@pytest.mark.parametrize("style", ["cumulative", "incremental"])
def test_a_recorded_abort_out_of_the_queue_is_an_end_without_tokens(style: str) -> None:
    (chunk,) = read_all(frames(f"stream_abort_waiting_{style}"))
    assert chunk.finish is not None
    assert (chunk.finish.reason, len(chunk.ids), chunk.finish.weight_spans) == ("abort", 0, ())


def test_a_recorded_refusal_in_a_stream_is_a_refusal() -> None:
    with pytest.raises(EngineRefused, match="longer than the model's context length"):
        read_all(frames("stream_too_long"))


def test_a_recorded_refusal_keeps_the_engines_words() -> None:
    record = recording("too_long")
    error = error_for_status(record["status"], record["body"].encode())
    assert isinstance(error, EngineRefused)
    assert "longer than the model's context length" in error.message


def test_a_server_that_names_no_call_is_believed() -> None:
    payload = whole("whole_length")
    del payload[META]["id"]
    assert len(read_all([payload])) == 1


def test_recorded_scores_are_read() -> None:
    record = recording("score")
    ids = np.array(record["request"]["input_ids"], np.int32)
    meta = meta_of(json.loads(record["body"]), RID)
    scores = input_logprobs(meta, ids, 2, VOCAB)
    assert len(scores) == 2
    assert chosen_logprob(whole("score_one")[META], 7) < 0
    with pytest.raises(EngineProtocolError):
        input_logprobs(meta, ids, 1, VOCAB)
    with pytest.raises(EngineProtocolError, match="other ids"):
        input_logprobs(meta, np.where(ids == ids[-1], VOCAB - 1, ids), 2, VOCAB)
    with pytest.raises(EngineProtocolError):
        chosen_logprob(whole("score_one")[META], 8)


Change = Callable[[dict[str, Any]], object]
META = "meta_info"

UNRECORDABLE: dict[str, Change] = {
    "no meta_info": lambda p: p.pop(META),
    "a reply to another call": lambda p: p[META].update(id="call-2"),
    "no logprobs": lambda p: p[META].pop("output_token_logprobs"),
    "logprobs are null": lambda p: p[META].update(output_token_logprobs=None),
    "a null logprob": lambda p: p[META]["output_token_logprobs"][1].__setitem__(0, None),
    "a logprob that is text": lambda p: p[META]["output_token_logprobs"][1].__setitem__(0, "-1.0"),
    "an infinite logprob": lambda p: p[META]["output_token_logprobs"][1].__setitem__(0, float("-inf")),
    "a logprob that is no number": lambda p: p[META]["output_token_logprobs"][1].__setitem__(0, float("nan")),
    "a logprob beyond float32": lambda p: p[META]["output_token_logprobs"][1].__setitem__(0, -1e300),
    "a probability above 1": lambda p: p[META]["output_token_logprobs"][1].__setitem__(0, 0.7),
    "a short entry": lambda p: p[META]["output_token_logprobs"].__setitem__(1, [-1.0]),
    "an id that is no number": lambda p: p[META]["output_token_logprobs"][1].__setitem__(1, "7"),
    "a negative id": lambda p: p[META]["output_token_logprobs"][1].__setitem__(1, -7),
    "an id beyond int32": lambda p: (
        p[META]["output_token_logprobs"][1].__setitem__(1, 1 << 31),
        p["output_ids"].__setitem__(1, 1 << 31),
    ),
    "an id beyond int64": lambda p: (
        p[META]["output_token_logprobs"][1].__setitem__(1, 1 << 63),
        p["output_ids"].__setitem__(1, 1 << 63),
    ),
    "a logprob too few": lambda p: p[META]["output_token_logprobs"].pop(),
    "a wrong count": lambda p: p[META].update(completion_tokens=5),
    "no count": lambda p: p[META].pop("completion_tokens"),
    "other output_ids": lambda p: p["output_ids"].__setitem__(0, 7),
    "too few output_ids": lambda p: p["output_ids"].pop(),
    "no weights named": lambda p: (p[META].pop("weight_versions"), p[META].pop("weight_version")),
    "spans with a gap": lambda p: p[META]["weight_versions"][0].update(start=1),
    "spans too short": lambda p: p[META]["weight_versions"][0].update(end=3),
    "a span without a name": lambda p: p[META]["weight_versions"][0].update(version=None),
    "weights that are no name": lambda p: (
        p[META].pop("weight_versions"),
        p[META].update(weight_version={"name": "default"}),
    ),
    "an unknown finish": lambda p: p[META]["finish_reason"].update(type="tired"),
    "a finish that is text": lambda p: p[META].update(finish_reason="stop"),
}


@pytest.mark.parametrize("change", UNRECORDABLE.values(), ids=UNRECORDABLE.keys())
def test_a_reply_that_cannot_be_recorded_is_an_error(change: Change) -> None:
    payload = whole("whole_length")
    read_all([payload])
    change(payload)
    with pytest.raises(EngineProtocolError):
        read_all([payload])


def test_a_cumulative_chunk_that_repeats_other_tokens_is_an_error() -> None:
    payloads = frames("stream_length_cumulative")
    assert len(payloads) > 2
    payloads[1][META]["output_token_logprobs"][0][1] = 7
    payloads[1]["output_ids"][0] = 7
    with pytest.raises(EngineProtocolError, match="repeats other tokens"):
        read_all(payloads)


def test_a_version_for_the_whole_call_is_one_span() -> None:
    payload = whole("whole_length")
    del payload[META]["weight_versions"]
    (chunk,) = read_all([payload])
    assert chunk.finish is not None
    assert [(s.start, s.end, s.version) for s in chunk.finish.weight_spans] == [(0, 4, "default")]


@pytest.mark.parametrize(
    ("status", "error"), [(400, EngineRefused), (503, EngineUnavailable), (500, EngineUnavailable)]
)
def test_an_abort_with_a_status_is_that_error(status: int, error: type[TurnstileError]) -> None:
    payload = whole("whole_length")
    payload[META]["finish_reason"] = {"type": "abort", "message": "no room", "status_code": status}
    with pytest.raises(error, match="no room"):
        read_all([payload])


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, EngineRefused),
        (422, EngineRefused),
        (413, EngineRefused),
        (401, EngineUnavailable),
        (403, EngineUnavailable),
        (429, EngineUnavailable),
        (500, EngineUnavailable),
        (503, EngineUnavailable),
        (302, EngineProtocolError),
        (404, EngineProtocolError),
    ],
)
@pytest.mark.parametrize(
    "body", [b"", b"<html>busy</html>", b'{"error": {"message": "busy"}}', b'["busy"]', b"\xff"]
)
def test_every_status_and_body_has_a_typed_error(status: int, error: type[TurnstileError], body: bytes) -> None:
    assert type(error_for_status(status, body)) is error


@given(st.data())
def test_any_chunking_in_either_style_gives_the_same_tokens(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    entries = [[-0.5 - i, data.draw(st.integers(0, 5)), None] for i in range(count)]
    cuts = sorted(data.draw(st.sets(st.integers(1, count)))) or [count]
    ends = cuts if cuts[-1] == count else [*cuts, count]
    incremental = data.draw(st.booleans())
    payloads, seen = [], 0
    for end in ends:
        part = entries[seen:end] if incremental else entries[:end]
        meta = {
            "completion_tokens": end,
            "output_token_logprobs": part,
            "weight_version": "a",
            "finish_reason": None,
        }
        payloads.append({"output_ids": [entry[1] for entry in part], META: meta})
        seen = end
    payloads[-1][META]["finish_reason"] = {"type": "length", "length": count}  # type: ignore[index]
    ids, logprobs = tokens(read_all(payloads))
    assert ids == [entry[1] for entry in entries]
    assert logprobs == [entry[0] for entry in entries]


@given(st.data())
def test_events_read_together_say_what_they_say_one_by_one(data: st.DataObject) -> None:
    """Tokens, their weights, the finish, and the error after them: the same, in fewer chunks."""
    count = data.draw(st.integers(1, 10))
    entries = [[-0.5 - i, data.draw(st.integers(0, 9)), None] for i in range(count)]
    ends = sorted({*data.draw(st.sets(st.integers(1, count))), count})
    payloads: list[dict[str, Any]] = []
    for end in ends:
        meta = {
            "completion_tokens": end,
            "output_token_logprobs": entries[:end],
            "weight_version": data.draw(st.sampled_from(["a", "a", "a", "b"])),
            "cached_tokens": data.draw(st.integers(0, 1)),
            "finish_reason": None,
        }
        payloads.append({META: meta})
    last = payloads[data.draw(st.sampled_from([-1, -1, 0]))]
    last[META].update(data.draw(st.sampled_from([{"finish_reason": {"type": "stop", "matched": 3}}, {"id": "x"}])))

    def read(groups: list[list[dict[str, Any]]]) -> tuple[list[tuple[Any, ...]], Any, Any, int]:
        call = LiveCall(10, in_place={"b"})
        reader = ReplyReader(RID, "a", call=call, vocab_size=data_vocab)
        told: list[tuple[Any, ...]] = []
        finish: Any = None
        chunks = 0
        try:
            for group in groups:
                for chunk in reader.read_all(iter(group)):
                    assert finish is None
                    about = chunk.weight_version, chunk.stale_kv
                    told += [(*pair, *about) for pair in zip(chunk.ids, chunk.logprobs, strict=True)]
                    finish, chunks = chunk.finish, chunks + 1
                if finish is not None:
                    break
        except EngineProtocolError as error:
            return told, finish, error.message, chunks
        return told, finish, None, chunks

    data_vocab = data.draw(st.sampled_from([10, 10, 5]))
    alone = read([[payload] for payload in payloads])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(payloads)))))
    groups = [payloads[a:b] for a, b in zip([0, *cuts], [*cuts, len(payloads)], strict=True)]
    together = read(groups)
    assert together[:3] == alone[:3]
    assert together[3] <= alone[3]


@given(st.data())
def test_a_stream_splits_alike_wherever_its_bytes_are_cut(data: st.DataObject) -> None:
    stream = b': comment\r\n\r\nevent: x\ndata: {"a": 1}\r\n\r\n' + sse([{"b": "é"}, {"c": []}])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)))))
    splitter, payloads, start = SseSplitter(1000), [], 0
    for end in [*cuts, len(stream)]:
        payloads += splitter.feed(stream[start:end])
        start = end
    assert payloads == [b'{"a": 1}', b'{"b": "\\u00e9"}', b'{"c": []}', b"[DONE]"]


def test_a_line_without_end_is_refused_at_the_limit() -> None:
    splitter = SseSplitter(100)
    splitter.feed(b"data: " + b"x" * 94)
    with pytest.raises(EngineProtocolError, match="larger than 100"):
        splitter.feed(b"x")


def test_a_page_in_place_of_a_stream_is_refused() -> None:
    with pytest.raises(EngineProtocolError, match="not an event stream"):
        SseSplitter(1000).feed(b"<html>\n")


def test_the_request_is_the_documented_one() -> None:
    ids = np.arange(2, 8, dtype=np.int32)[::2]
    sampling = EngineSampling(
        max_new_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        stop=("x",),
        stop_token_ids=(4,),
        json_schema="{}",
    )
    assert json.loads(b"".join(generate_body([ids_json(ids)], sampling, rid="r", stream=True))) == {
        "rid": "r",
        "input_ids": [2, 4, 6],
        "return_logprob": True,
        "stream": True,
        "sampling_params": {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "min_p": 0.1,
            "max_new_tokens": 5,
            "stop": ["x"],
            "stop_token_ids": [4],
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            "n": 1,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "ignore_eos": False,
            "logit_bias": None,
            "json_schema": "{}",
        },
    }


def test_a_grammar_of_the_server_goes_with_its_place_in_the_call() -> None:
    sampling = EngineSampling(max_new_tokens=5, structural_tag="a tag", grammar_from=2)
    body = json.loads(b"".join(generate_body([b"1,2,3"], sampling, rid="r", stream=True)))
    assert (body["sampling_params"]["structural_tag"], body["grammar_from"]) == ("a tag", 2)
    assert "json_schema" not in body["sampling_params"]


MUTATIONS: list[dict[str, Any]] = [
    {},
    {"completion_tokens": 1},
    {"completion_tokens": True},
    {"completion_tokens": 99},
    {"completion_tokens": None},
    {"output_token_logprobs": []},
    {"output_token_logprobs": None},
    {"output_token_logprobs": [[-1.0, 3, None]]},
    {"output_token_logprobs": [[-1.0, VOCAB, None]]},
    {"output_token_logprobs": [["x", 3, None]]},
    {"output_token_logprobs": [[float("nan"), 3, None]]},
    {"weight_version": "other"},
    {"weight_version": None},
    {"weight_version": 1},
    {"weight_versions": [{"version": "default", "start": 0, "end": 99}]},
    {"weight_versions": "all"},
    {"cached_tokens": 3},
    {"id": "another"},
    {"finish_reason": {"type": "length", "length": 2}},
    {"finish_reason": {"type": "abort", "status_code": 503}},
    {"finish_reason": "stop"},
]
"""Of the ``meta_info`` of an event in the middle of a stream."""


class _EveryStep(ReplyReader):
    """Takes the way for all events."""

    def _ordinary(self, payload: Any) -> None:
        return None


@given(st.data())
def test_the_short_way_for_ordinary_events_says_what_the_way_for_all_says(data: st.DataObject) -> None:
    payloads = frames(f"stream_length_{data.draw(st.sampled_from(['cumulative', 'incremental']))}")
    for payload in payloads[: data.draw(st.integers(0, len(payloads)))]:
        if data.draw(st.booleans()):
            payload[META].update(data.draw(st.sampled_from(MUTATIONS)))
        if data.draw(st.integers(0, 3)) == 0:
            payload.update(
                data.draw(st.sampled_from([{"output_ids": [3]}, {"output_ids": None}, {"error": "no"}]))
            )
    in_place = data.draw(st.sampled_from([set(), {"default"}, {"other"}]))

    def outcome(kind: type[ReplyReader]) -> list[Any]:
        reader = kind(RID, "default", call=LiveCall(10, in_place=set(in_place)), adapter="lora", vocab_size=VOCAB)
        told: list[Any] = []
        try:
            for payload in payloads:
                if (chunk := reader.read(payload)) is not None:
                    told.append((chunk.ids.tolist(), chunk.logprobs.tolist(), chunk.weight_version))
                    told.append((chunk.stale_kv, chunk.finish))
        except TurnstileError as error:
            told.append((type(error), error.message))
        return [*told, reader._weights.spans]

    assert outcome(ReplyReader) == outcome(_EveryStep)


def test_ordinary_events_take_the_short_way() -> None:
    for style in ("cumulative", "incremental"):
        reader = ReplyReader(RID, "default")
        taken = [
            reader._ordinary(payload) is not None or not reader.read(payload)
            for payload in frames(f"stream_length_{style}")
        ]
        assert taken == [False, True, True, False], "the first names the weights, the last ends it"
