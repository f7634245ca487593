"""The machine benchmark (probe): rates of devices, links and disk, measured on all ranks at the same time."""
