"""Recognize the layout `auto`, for which Paceline chooses the layout."""

AUTO = "auto"


def is_auto(text: str | None) -> bool:
    """Return whether the text is `auto`."""
    return text is not None and text.strip().lower() == AUTO
