"""Forecast the workspace memory that CPU kernels use internally, by operator."""
