"""The machine benchmark (probe): it measures devices, links and disk while all ranks are busy at the same time."""
