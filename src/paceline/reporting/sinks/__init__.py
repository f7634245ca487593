"""Where metrics and events go while a run trains: JSON lines, console, TensorBoard."""
