"""The parts of messages that are no text: pictures, sound, films and documents.

The model reads text only. ``gate.images`` says what becomes of such a part: a text in its place, always the same,
so that the conversation goes on as one path; or a refusal, which is the fault of the set-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from turnstile_server.errors import ImagesNotServed


@dataclass(frozen=True, slots=True)
class Media:
    """What stands in the place of a part that is no text. ``words``: by the part's kind; None: it is refused."""

    words: Mapping[str, str] | None = None

    def text(self, kind: str, where: str) -> str:
        """The text for a part at ``where`` in the body. Raises ImagesNotServed."""
        if self.words is None:
            raise ImagesNotServed(
                f"{where}: the model reads text only, and gate.images = refuse: nothing that is no text (here: "
                f"{kind}) may be sent to it. With gate.images = omit a text stands in its place"
            )
        return self.words[kind]


REFUSED = Media()


@dataclass(slots=True)
class TextContent:
    """The content of one message, as it is read: its texts, and the kinds of the parts that were left out."""

    texts: list[str] = field(default_factory=list)
    omitted: list[str] = field(default_factory=list)

    def omit(self, kind: str, where: str, media: Media) -> None:
        """Puts a text in the place of a part. Raises ImagesNotServed."""
        self.texts.append(media.text(kind, where))
        self.omitted.append(kind)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def media_kind(mime_type: object) -> str:
    """The kind of a part of this MIME type."""
    kind = mime_type.partition("/")[0].lower() if isinstance(mime_type, str) else ""
    return kind if kind in ("image", "audio", "video") else "document"
