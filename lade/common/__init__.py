"""Shared by all parts: state per model, files that outlive a process, copies to a device, bounds of comparisons."""
