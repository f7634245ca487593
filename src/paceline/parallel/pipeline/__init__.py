"""Stages of any model: where it is cut, what crosses, and running one by the model's own forward."""
