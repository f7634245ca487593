"""The process that starts, watches and ends the ranks of one machine, and the ranks' own main function."""
