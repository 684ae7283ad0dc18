"""Scripts that write files of the repository or score predictions. A package, so that one of a checkout on PYTHONPATH is not it."""
