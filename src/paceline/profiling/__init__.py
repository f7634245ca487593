"""Measurement of models and machines."""
