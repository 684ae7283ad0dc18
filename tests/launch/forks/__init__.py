"""Tests of options of forks."""
