"""Auditing: every place that a call could read is written, one at a time, beside the plain call."""
