"""Recorded steps that are trained again, and the trainer that does it."""
