"""Which samples are in which microbatch, as a pure function of seed, epoch and position. No torch."""
