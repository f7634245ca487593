"""Find the likely cause of a differing gradient or update, by testing hypotheses against the numbers."""
