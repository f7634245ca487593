"""Console output, and the formatting of numbers and lists.

Start with `output.py`.

- `escaping.py`: Escape control characters in text from untrusted files, and replace characters that a terminal can't
  show.
- `formatting.py`: Formatting for people: numbers with their units, and suggestions for typing errors.
- `output.py`: Output to a terminal that may be closed: a reader that has exited (`| head -1`, `>&-`) does not end a
  run.
"""
