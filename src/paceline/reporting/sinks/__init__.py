"""Sinks for metrics and events while a run trains: JSON lines, console, TensorBoard."""
