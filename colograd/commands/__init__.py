"""The console script ``colograd``, a module for each of its commands."""
