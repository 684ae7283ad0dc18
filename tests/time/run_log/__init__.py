"""Logs of runs: how they are read, compared with a prediction, and used as a calibration."""
