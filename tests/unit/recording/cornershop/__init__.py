"""A user's package. The tests copy it elsewhere, so that a replay can't import it."""
