"""Text cut to a length."""


def shorten(text: str, length: int) -> str:
    """`text`, or its beginning and `...`, at most `length` characters (3 or more) together."""
    return text if len(text) <= length else text[: length - 3].rstrip() + "..."
