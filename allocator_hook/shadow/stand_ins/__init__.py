"""Replacements for optional packages that the machine of the shadow engine does not need: optimizers and MoE dispatchers."""
