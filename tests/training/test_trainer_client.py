"""The clients as the training loop that samples; both kinds, against a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import numpy as np
import pytest

from training_support import GO, SLOW_S, TrainerServer
from turnstile import AsyncClient, Client, InvalidRequest
from turnstile import errors as turnstile_errors
from turnstile.sync import NewEpisodeHandle

END = "<|im_end|>"


@contextmanager
def asking(episode: NewEpisodeHandle) -> Iterator[list[httpx.Response]]:
    """An agent's call under way in a thread; the block's end waits for its reply."""
    replies: list[httpx.Response] = []

    def ask() -> None:
        headers = {"authorization": f"Bearer {episode.episode_key}"}
        body = {"model": "m", "messages": GO, "max_tokens": 64}
        url = f"{episode.model_url}/v1/chat/completions"
        replies.append(httpx.post(url, headers=headers, json=body, timeout=SLOW_S))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield replies
    except BaseException:
        episode.cancel()
        raise
    finally:
        thread.join()


def test_the_blocking_client_samples_for_an_agent(server: TrainerServer) -> None:
    with Client(server.url, key=server.key) as client, client.create_episode("Do it.") as episode:
        assert episode.pending(timeout=0.05).calls == ()
        with asking(episode) as replies:
            (call,) = episode.pending(timeout=SLOW_S).calls
            assert call.input_ids.dtype == np.int32
            ids = np.array(server.encode(f"Yes.{END}"), np.int64)
            logprobs = np.linspace(-2, -0.1, len(ids), dtype=np.float32)
            accepted = episode.complete(call.call_id, ids, logprobs, weight_version="step-3")
            assert (accepted.tokens, accepted.weight_version) == (len(ids), "step-3")
            assert (
                episode.complete(call.call_id, ids.tolist(), logprobs.tolist(), weight_version="step-3")
                == accepted
            )
        assert replies[0].json()["choices"][0]["message"]["content"] == "Yes."
        episode.finish()
        ended = episode.pending()
        assert (ended.status, ended.calls) == ("completed", ())
        (row,) = episode.samples().samples
        np.testing.assert_array_equal(row.logprobs[row.loss_mask == 1], logprobs)
        assert row.weight_version_names == ("step-3",)


def test_what_cannot_be_sent_or_be_a_turn_is_an_invalid_request(server: TrainerServer) -> None:
    with Client(server.url, key=server.key) as client, client.create_episode("Do it.") as episode:
        with asking(episode):
            (call,) = episode.pending(timeout=SLOW_S).calls
            with pytest.raises(InvalidRequest, match="logprobs: nan at index"):
                episode.complete(call.call_id, [1], [float("nan")])
            with pytest.raises(InvalidRequest, match="logprobs"):
                episode.complete(call.call_id, [1])
            with pytest.raises(InvalidRequest, match="one for each"):
                episode.complete(call.call_id, [1, 2], [-0.5])
            with pytest.raises(turnstile_errors.NotFound):
                episode.complete("call_x", text="x")
            episode.complete(call.call_id, text="Given.")
            with pytest.raises(turnstile_errors.Conflict):
                episode.complete(call.call_id, text="Otherwise.")
        with pytest.raises(turnstile_errors.Conflict):
            episode.complete(call.call_id, text="Otherwise.")
        episode.cancel()


@pytest.mark.anyio
async def test_the_async_client_samples_for_an_agent(server: TrainerServer) -> None:
    async with AsyncClient(server.url, key=server.key) as client:
        episode = await client.create_episode("Do it.")
        with asking(NewEpisodeHandle(Client(server.url, key=server.key), episode.created)) as replies:
            (call,) = (await episode.pending(SLOW_S)).calls
            await episode.complete(call.call_id, text="Fine.")
        await episode.cancel()
        with pytest.raises(turnstile_errors.Conflict):
            await episode.complete(call.call_id, [1], [-0.5])
    assert replies[0].json()["choices"][0]["message"]["content"] == "Fine."
