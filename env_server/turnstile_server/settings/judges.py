"""Settings of language models that judge works, by name: ``grading.judges``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from turnstile_server.settings.section import Section


class JudgeSettings(Section):
    """One judge: a model behind an OpenAI-compatible address. It is asked from the server, never from a
    sandbox."""

    url: str = Field(description="Address up to and with `/v1`; `/chat/completions` is added.")
    model: str = Field(min_length=1, description="The model's name there.")
    key_env: str | None = Field(None, description="Variable of the server's environment that holds the key.")
    key_file: Path | None = Field(None, description="File that holds the key, read at each call.")
    temperature: float = Field(0.0, ge=0, le=10, description="Sampling temperature.")
    max_tokens: int = Field(1024, ge=16, description="Longest reply; one that is cut off is no verdict.")
    json_mode: bool = Field(True, description="Asks for `response_format: json_object`.")
    extra_body: dict[str, Any] = Field(
        default_factory=dict, description="Further fields of the request, such as `reasoning_effort`."
    )
    timeout_s: float = Field(120.0, gt=0, description="Time for one call, without the wait for a place.")
    parallel: int = Field(4, ge=1, description="Calls at once; further ones wait.")
    max_calls_per_grading: int = Field(
        32, ge=1, description="Calls for one work, repeated ones included; with more it has no reward."
    )
    max_tokens_per_grading: int = Field(
        200_000, ge=1, description="Tokens of prompts and replies for one work; with more it has no reward."
    )
    max_calls: int | None = Field(
        None, ge=1, description="Calls since the server's start; after them works have no reward. None: no bound."
    )
    max_total_tokens: int | None = Field(None, ge=1, description="The same for tokens of prompts and replies.")
    max_text_chars: int = Field(
        24_000, ge=200, description="Longest text of a work that is shown; of a longer one the middle is left out."
    )

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("write an address like `https://host/v1`")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.key_env is not None and self.key_file is not None:
            raise ValueError("write `key_env` or `key_file`, not both")
        return self

    def key(self) -> str | None:
        """The key as it is now; None: the judge wants none. Raises OSError, and ValueError where it is missing."""
        if self.key_file is not None:
            key = self.key_file.read_text().strip()
        elif self.key_env is not None:
            key = os.environ.get(self.key_env, "").strip()
        else:
            return None
        if not key or not key.isascii() or not key.isprintable():
            raise ValueError(f"{self.key_file or self.key_env} holds no key")
        return key
