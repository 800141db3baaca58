"""Whole steps of the paper's method (window and n-gram pool) on the device."""
