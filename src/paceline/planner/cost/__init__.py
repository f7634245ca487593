"""Estimate the memory and the seconds of one step for a layout: the cost model."""
