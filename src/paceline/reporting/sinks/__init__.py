"""Sinks for metrics and events while a run trains: JSON lines, console, TensorBoard.

Start with `sink_registry.py`.

- `console_lines.py`: The console output: one line for each logged step, and one or more lines for each other event.
- `jsonl.py`: The sink that writes every event and every logged number to the run folder, one JSON object per line.
- `log_tail.py`: The live output of a run in the terminal that started it: one rank's log lines, and a progress bar.
- `sink_registry.py`: The table of sinks by name; `"my.pkg:Thing"` names a sink of the user.
"""
