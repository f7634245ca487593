"""Start values: those of one plain build, or of streams keyed by name; a rank gets its parts, and no more."""
