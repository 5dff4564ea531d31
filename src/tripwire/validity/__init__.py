"""Validity: compiled code is used for as long as nothing that it read has changed."""

from tripwire.rulebook.refusals import Cause, Writer

__all__ = ["Cause", "Writer"]
