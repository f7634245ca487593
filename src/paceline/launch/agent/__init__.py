"""The agent that starts, watches and ends the ranks of one machine, and the main function of a rank."""
