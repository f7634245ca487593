"""The layout `auto`, which is chosen automatically."""

AUTO = "auto"


def is_auto(text: str | None) -> bool:
    """Return whether the text is `auto`."""
    return text is not None and text.strip().lower() == AUTO
