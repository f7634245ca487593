"""The word for a layout that is chosen automatically."""

AUTO = "auto"


def is_auto(text: str | None) -> bool:
    """Return whether the text is that word."""
    return text is not None and text.strip().lower() == AUTO
