"""Search for the fastest layout that fits: search space, bounds, branch and bound."""
