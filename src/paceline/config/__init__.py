"""User configuration: settings, layout, update rule, compression and job reference, read and checked."""
