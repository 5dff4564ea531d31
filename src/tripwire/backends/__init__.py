"""Back ends: a graph becomes a callable."""
