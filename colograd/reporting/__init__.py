"""A run's output for people: metrics on the console, times of phases, and the observer that the parts of a run tell."""
