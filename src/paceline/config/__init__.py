"""Read and check what the user asked for: settings, layout, update rule, compression and job reference."""
