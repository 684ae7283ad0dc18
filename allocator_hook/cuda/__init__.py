"""The CUDA recorder: a PyTorch allocator that records all allocations. `build` compiles it, `install` makes PyTorch use it."""
