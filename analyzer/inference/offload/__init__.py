"""Inference with weights, KV cache and activations on the GPU, in host memory and on disk, as FlexLLMGen runs it."""
