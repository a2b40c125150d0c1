"""Runs the user's functions: reward functions, tools and environments. Each call ends with an `Outcome`. `untrusted` reads
what models, tools and programs write.
"""
