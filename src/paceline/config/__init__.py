"""What the user asked for: settings, layout, update rule, compression and job reference, read and checked."""
