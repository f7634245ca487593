"""The data order: maps seed, epoch and position to the samples of each microbatch as a pure function. No torch."""
