"""Launches through frameworks that train with megatron-core: their configurations, read as options of Megatron-LM.

`prepare` finds out whether a command line is one of a framework. One file or folder for each framework has the keys of its
configuration.
"""
