"""Logs of training runs (`--info-log`, `--info-calibration`): what was measured, beside what is predicted."""
