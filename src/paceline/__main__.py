"""The entry point of `python -m paceline`."""

from paceline.cli import entry

entry()
