"""The CUDA recorder: an allocator for PyTorch that records what it is asked for. `build` compiles, `install` puts it in place."""
