"""Whole steps of the paper's method on the device."""
