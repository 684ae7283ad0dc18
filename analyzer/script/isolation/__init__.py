"""Runs a launch script so that nothing that it does outlasts the run: in Linux namespaces, or under the preloaded library."""
