"""The cost model: memory and seconds of one step for a layout."""
