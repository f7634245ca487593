"""Code that several commands share: option checks, devices, starting the ranks, and the command that resumes a run."""
