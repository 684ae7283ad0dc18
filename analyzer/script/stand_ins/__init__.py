"""The programs that stand for launchers and for commands that change a cluster while a launch script runs.

A script may start hundreds of them, so these modules import as little as possible: no typing, re, json or dataclasses.
"""
