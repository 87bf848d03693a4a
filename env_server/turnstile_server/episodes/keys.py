"""Episode keys: derived, never stored. A key dies with its episode and opens no later one of the same id."""

from __future__ import annotations

import hashlib
import hmac
import secrets

_PREFIX = "tsk"
_NONCE_BYTES = 8


def new_nonce() -> str:
    """What tells apart two episodes of one id: 16 hex digits."""
    return secrets.token_hex(_NONCE_BYTES)


class EpisodeKeys:
    """``key = tsk-{nonce}-{HMAC-SHA256(server secret, episode id and nonce)}``: a restart keeps the keys, a lost
    secret ends them all, and a key of an episode that is gone can still be told from one that never was."""

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
