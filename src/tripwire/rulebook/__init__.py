"""The rulebook: what is done with each function of torch, and which C functions only compute."""
