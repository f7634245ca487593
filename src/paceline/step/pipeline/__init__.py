"""An interpreter of pipeline schedules on each rank: actions, messages, split backward."""
