"""Options of forks of Megatron-LM, and how they are read as options of Megatron-LM."""
