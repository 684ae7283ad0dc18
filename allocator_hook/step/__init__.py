"""Runs the training step of one rank of a `TrainingJob` with megatron-core, as Megatron-LM's training loop does.

The step does not depend on the recorder: both the CUDA recorder and the shadow recorder use it.
"""
