"""A process with torch imported, which is forked where the command would start one: most of a short run's time."""
