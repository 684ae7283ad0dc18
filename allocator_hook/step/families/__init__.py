"""The models other than GPT: their modules, batches and loss functions, as the training scripts of Megatron-LM have them."""
