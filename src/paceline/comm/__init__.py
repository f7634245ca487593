"""Process groups: the world of ranks, the groups of a mesh, ranks simulated by threads, errors raised on all ranks."""
