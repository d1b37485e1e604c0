"""Units of any module: where its own forward() can be cut, found by running it, and a part of it run by itself."""
