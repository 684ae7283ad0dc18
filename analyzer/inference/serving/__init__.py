"""Serving: engines with continuous batching, whose kernels were measured.

`engines` has what is known of each engine, `tables` the measured kernels, `step` the seconds of a step, and `batching` the steps
that a number of clients causes.
"""
