"""Values: what Python values are and hold, found without running any of their code."""
