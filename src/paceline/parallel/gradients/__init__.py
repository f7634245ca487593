"""Gradient norms, tied parameters, and reducers that are combined from several."""
