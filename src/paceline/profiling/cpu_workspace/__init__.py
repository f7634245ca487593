"""Memory that CPU kernels use internally, by operator."""
