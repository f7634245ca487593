"""Code that several commands share: options, devices, starting ranks, the line that resumes a run."""
