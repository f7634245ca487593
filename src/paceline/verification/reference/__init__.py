"""The oracles: one process, or a serial version of an asynchronous rule."""
