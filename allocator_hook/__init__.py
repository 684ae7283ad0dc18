"""Recorders of the allocations and collectives of a real training step. FORMAT.md describes the trace files they write."""
