"""Diagnosis of a differing gradient or update: hypotheses that are tested against the numbers."""
