"""The folder of a run, and the plan file in it."""
