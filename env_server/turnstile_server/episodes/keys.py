"""Episode keys: derived from the server's secret, never stored.

A key opens one episode. It dies with the episode, and opens no later episode of the same id.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

_PREFIX = "tsk"
_NONCE_BYTES = 8


def new_nonce() -> str:
    """Distinguishes episodes that use one id after each other: 16 hex digits."""
    return secrets.token_hex(_NONCE_BYTES)


class EpisodeKeys:
    """Makes and checks keys: ``tsk-{nonce}-{HMAC-SHA256(server secret, episode id and nonce)}``.

    Keys stay valid over a restart. A lost secret makes all of them invalid. The key of a deleted episode is still
    recognised, so its agent gets 410 instead of 401.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def key(self, episode_id: str, nonce: str) -> str:
        digest = hmac.new(self._secret, f"episode:{episode_id}:{nonce}".encode(), hashlib.sha256)
        return f"{_PREFIX}-{nonce}-{digest.hexdigest()}"

    def nonce(self, episode_id: str, key: str) -> str | None:
        """The nonce of a key that this server made for ``episode_id``, None for any other key. Compares in
        constant time."""
        nonce = key.removeprefix(f"{_PREFIX}-").partition("-")[0]
        made = self.key(episode_id, nonce).encode("utf-8", "replace")
        return nonce if hmac.compare_digest(made, key.encode("utf-8", "replace")) else None
