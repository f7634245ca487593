"""The loss contract: the values a user's loss returns, how they are summed, and how they are reported."""
