"""Checks of a job and its options before the first step. A new incompatibility goes to `option_compatibility`."""
