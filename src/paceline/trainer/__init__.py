"""Training runs: the loop, the session of one rank, saving, logging, evaluation."""
