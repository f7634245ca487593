"""The only code that uses private torch APIs, and the dispatch modes and random streams built on them."""
