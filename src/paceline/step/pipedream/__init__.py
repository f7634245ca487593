"""The PipeDream step: a pipeline that is never flushed, with weight stashing."""
