"""Replays: train recorded optimizer steps of a run again, without sampling."""
