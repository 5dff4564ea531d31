"""Open: what of a run may be another number on the next call, and how compiled code comes to it."""
