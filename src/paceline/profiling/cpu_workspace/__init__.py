"""Workspace memory that CPU kernels use internally, by operator."""
