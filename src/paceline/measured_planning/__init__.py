"""Planning by measurement on this machine: profile the user's job, replay layouts, time the finalists."""
