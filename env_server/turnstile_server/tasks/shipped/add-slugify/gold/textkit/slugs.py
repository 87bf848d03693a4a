"""Names for use in URLs."""

import re
import unicodedata


def slugify(text: str) -> str:
    """An ASCII name: lower case, accents lost, everything else a dash, `untitled` of nothing."""
    plain = "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))
    return re.sub("[^a-z0-9]+", "-", plain.lower()).strip("-") or "untitled"
