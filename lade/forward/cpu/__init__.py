"""Blocks on a CPU: packed weights, and attention without repeated keys and values."""
