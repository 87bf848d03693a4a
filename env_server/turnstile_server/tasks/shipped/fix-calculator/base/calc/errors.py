class CalcError(ValueError):
    """The text is no expression, or has no value."""
