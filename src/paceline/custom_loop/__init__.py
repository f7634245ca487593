"""`pl.place`: a parallel model for the user's own training loop."""
