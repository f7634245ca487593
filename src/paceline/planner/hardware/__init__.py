"""Describe clusters, devices and links: from a catalogue, a file or benchmark results, with their efficiency."""
