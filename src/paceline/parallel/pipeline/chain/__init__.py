"""Pipeline stages of a model that is a chain of blocks."""
