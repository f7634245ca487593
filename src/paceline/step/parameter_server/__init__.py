"""A parameter server: workers push gradients, servers hold weights."""
