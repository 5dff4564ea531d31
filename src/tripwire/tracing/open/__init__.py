"""Open: sizes and numbers that may differ on the next call, and how compiled code finds them."""
