"""The stages of `benchmarks/gpu_check.py`. `plan`, `record` and `summary` import no torch; the others run in child
processes."""
