"""Every model of the zoo under every layout, each beside one process."""
