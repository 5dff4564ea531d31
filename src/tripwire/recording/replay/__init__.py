"""Replay: a record is looked at, rebuilt, and run again."""
