"""Measure machines, and trace what a model computes, stores and communicates."""
