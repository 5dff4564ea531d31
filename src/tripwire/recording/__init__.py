"""Recording: a call becomes a file that runs again elsewhere."""
