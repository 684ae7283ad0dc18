"""Inference launches: the options of this program and of inference scripts, and what is generated with which cache."""
