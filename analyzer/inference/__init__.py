"""Inference: memory and time of prefill and decode, with a cache of keys and values, and quantized weights.

The modules of the model are those of training, without what is saved for backward. `forward_job` builds their trees.
"""
