"""One file for each command of `paceline`, and the same commands as Python functions."""
