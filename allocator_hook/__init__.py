"""Recorders of a real training step: what it allocates and what it sends. FORMAT.md describes the trace that they write."""
