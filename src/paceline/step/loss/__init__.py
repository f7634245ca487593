"""What the user's loss returns, how it is summed, and what is reported of it."""
