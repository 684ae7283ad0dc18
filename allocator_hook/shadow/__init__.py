"""The shadow engine: runs the real megatron-core and the Python code of Transformer Engine without a GPU.

GPU tensors are replaced by meta tensors, which have shapes, types and storages but no data. The installed packages decide what
is allocated, saved for backward, freed and sent; only compiled kernels are replaced.
"""
