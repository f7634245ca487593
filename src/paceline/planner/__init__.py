"""Planning without a device: memory, step time, search and advice from a model's profile."""
