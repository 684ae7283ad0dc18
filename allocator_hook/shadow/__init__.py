"""The real megatron-core and the Python side of Transformer Engine, run without a GPU.

Tensors that would lie on the GPU are meta tensors: they have shapes, types and storages, and no data. What is
allocated, saved, freed and sent is decided by the code of the user's own packages; only compiled kernels are replaced.
"""
