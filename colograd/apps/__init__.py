"""The console script ``colograd``, with a module for each of its commands."""
