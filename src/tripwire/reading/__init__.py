"""Reading: what a run can reach, what of it was read, and what was written, as paths and steps."""
