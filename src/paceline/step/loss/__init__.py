"""The loss contract: the values a user's loss returns, and how they are checked and summed."""
