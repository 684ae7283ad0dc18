"""The phases of an iteration of reinforcement learning beside the update: memory of the GPU and of the host."""
