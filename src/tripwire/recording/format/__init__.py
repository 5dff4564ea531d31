"""Format: a record as a file, read without trust."""
