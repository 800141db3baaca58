"""Blocks of static shapes, compiled or captured in CUDA graphs, and an attention kernel."""
