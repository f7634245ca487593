"""Plan by measurement on this machine: profile the user's job, replay layouts, and time the finalists."""
