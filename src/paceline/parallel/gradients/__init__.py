"""Gradient norms, tied parameters, and combined reducers."""
