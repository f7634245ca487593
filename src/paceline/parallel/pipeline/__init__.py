"""Pipeline stages of any model: the split into stages, the values sent between stages, and the run of a stage."""
