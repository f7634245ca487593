"""The word for a layout that is to be chosen."""

AUTO = "auto"


def is_auto(text: str | None) -> bool:
    """Whether it is that."""
    return text is not None and text.strip().lower() == AUTO
