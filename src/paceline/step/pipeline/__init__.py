"""The execution of pipeline schedules on each rank: an interpreter of actions, messages, and split backward."""
