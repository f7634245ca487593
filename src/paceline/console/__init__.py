"""Console output, and the formatting of numbers and lists."""
