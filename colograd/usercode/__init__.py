"""Runs the user's functions: reward functions, tools and environments. Each call ends with an `Outcome`.

`untrusted` reads texts and JSON from models, tools and programs.
"""
