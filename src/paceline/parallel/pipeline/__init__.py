"""Pipeline stages of any model: cutting it, the values sent between stages, and running a stage."""
