"""Auditing: writes to every place that a call could read, and compares with the plain call."""
