"""Forecast the workspace of CPU operators: the memory that their kernels allocate internally."""
