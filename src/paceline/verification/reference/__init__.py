"""Reference implementations to compare with: one process, or a serial version of an asynchronous update rule."""
