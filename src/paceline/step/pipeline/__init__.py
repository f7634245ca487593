"""A pipeline schedule, interpreted on each rank: actions, messages, split backward."""
