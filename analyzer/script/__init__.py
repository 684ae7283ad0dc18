"""Runs a launch script with stand-ins for launchers and for commands that change a cluster, and collects the launches."""
