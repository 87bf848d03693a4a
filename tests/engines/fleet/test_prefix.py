"""What an episode has left in a prefix cache: its ids while it is busy, a digest at rest, the same answers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from turnstile.models import Int32Array
from turnstile_server.engines.fleet.prefix import BLOCK, PrefixMemory


def run_of(start: int, count: int) -> Int32Array:
    return np.arange(start, start + count, dtype=np.int32)


def left(memory: PrefixMemory, *pieces: Int32Array, episode_id: str = "e") -> None:
    memory.leave(episode_id, "w1", "v1", 0, pieces)


@given(data=st.data())
def test_ids_their_digest_and_what_is_out_of_room_give_the_same_answers(data: st.DataObject) -> None:
    memories = [PrefixMemory(8), PrefixMemory(8), PrefixMemory(8, most_bytes=0)]
    pieces = [run_of(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 2 * BLOCK))) for _ in range(3)]
    for memory in memories:
        left(memory, *pieces)
    memories[1].rest()
    memories[1].rest()
    assert [memory.kept_bytes > 0 for memory in memories[1:]] == [False, False]
    whole = np.concatenate(pieces)
    prompt = np.concatenate(
        [whole[: data.draw(st.integers(0, len(whole)))], run_of(0, data.draw(st.integers(0, 9)))]
    )
    asked = [data.draw(st.sampled_from([prompt, np.concatenate([whole, prompt])]))]
    edited = asked[0].copy()
    if len(edited):
        edited[data.draw(st.integers(0, len(edited) - 1))] += 1
    for ids in (*asked, edited):
        answers = {memory.expected("e", "w1", "v1", 0, ids) for memory in memories}
        repeated = len(whole) > 0 and len(ids) >= len(whole) and np.array_equal(ids[: len(whole)], whole)
        assert answers == {(len(whole) - 1) // BLOCK * BLOCK if repeated else 0}


def test_an_episode_rests_when_no_call_of_it_ended_between_two_looks() -> None:
    memory = PrefixMemory(8)
    left(memory, run_of(0, 100), episode_id="a")
    memory.rest()
    left(memory, run_of(0, 100), episode_id="b")
    assert memory.kept_bytes == 800
    memory.rest()
    assert memory.kept_bytes == 400
    memory.forget("b")
    memory.forget("a")
    assert memory.kept_bytes == 0


def test_other_workers_weights_and_epochs_say_nothing() -> None:
    memory, ids = PrefixMemory(1), run_of(0, 300)
    left(memory, ids)
    assert memory.expected("e", "w1", "v1", 0, ids) == 256
    assert memory.expected("e", "w2", "v1", 0, ids) == 0
    assert memory.expected("e", "w1", "v2", 0, ids) == 0
    assert memory.expected("e", "w1", "v1", 1, ids) == 0
    left(memory, ids, episode_id="other")
    assert memory.expected("e", "w1", "v1", 0, ids) == 0, "more episodes than are remembered"
    memory.leave("other", "w1", None, 0, [ids])
    assert memory.kept_bytes == 0


@given(st.lists(st.integers(0, 1), min_size=2, max_size=400), st.integers(1, 400), st.integers(0, 3))
def test_ids_that_lie_where_the_prompts_do_give_the_answers_of_a_copy(
    ids: list[int], left: int, start: int
) -> None:
    buffer = np.array(ids, np.int32)
    left = min(left, len(buffer))
    prompts = [buffer[start:], buffer[:left], buffer[::2], buffer[::-1], buffer.copy()]
    answers = []
    for piece in (buffer[:left], buffer[:left].copy()):
        memory = PrefixMemory(1)
        memory.leave("ep_0", "w0", "v0", 0, [piece, buffer[:1]])
        answers.append([memory.expected("ep_0", "w0", "v0", 0, prompt) for prompt in prompts])
    assert answers[0] == answers[1]
