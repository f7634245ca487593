"""`paceline verify`: check that a layout computes the same training as one process."""
