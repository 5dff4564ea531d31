"""Dispatch: a call goes to the compiled entry that holds for it, or to a new trace."""
