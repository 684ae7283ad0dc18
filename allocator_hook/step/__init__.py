"""One training step of megatron-core from a `Launch`, as Megatron-LM's own training loop runs it, for one rank.

It knows nothing of how it is recorded: the CUDA recorder and the shadow both use it.
"""
