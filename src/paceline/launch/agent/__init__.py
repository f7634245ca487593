"""The supervisor that starts, watches and ends the ranks of one machine, and the main function of a rank."""
