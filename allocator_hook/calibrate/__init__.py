"""Measures the kernels and the collectives of the machine that it runs on, and derives the efficiencies of the time model."""
