"""Capture: a call and all that it reaches become a record."""
