"""Episode keys: derived, never stored. A key dies with its episode, since an ended episode takes no calls."""

from __future__ import annotations

import hashlib
import hmac

_PREFIX = "tsk-"


class EpisodeKeys:
    """``key = HMAC-SHA256(server secret, episode id)``: a restart keeps the keys, a lost secret ends them all."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def key(self, episode_id: str) -> str:
        digest = hmac.new(self._secret, b"episode:" + episode_id.encode(), hashlib.sha256)
        return _PREFIX + digest.hexdigest()

    def opens(self, episode_id: str, key: str) -> bool:
        """Compares in constant time."""
        return hmac.compare_digest(self.key(episode_id).encode(), key.encode("utf-8", "replace"))
