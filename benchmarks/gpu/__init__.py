"""The stages of `benchmarks/gpu_check.py`, which run in child processes, and a stand-in for CUDA graphs."""
