"""Comparisons of layouts with each other: side by side, or one as the reference of another.

Start with `verify_against.py`.

- `compare_layouts.py`: `compare JOB --layouts A B C`: trains the job in each layout, on the same samples in the same
  microbatches.
- `verify_against.py`: `verify --against`: compares a layout with another layout, or with a recording, for models that
  no process holds.
"""
