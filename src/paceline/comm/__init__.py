"""Process groups: the world of ranks, the groups of a mesh, ranks played by threads, errors that all ranks raise."""
