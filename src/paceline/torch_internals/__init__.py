"""The only code that touches private torch APIs, and the dispatch modes and random streams built on them."""
