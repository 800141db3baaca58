"""Verification: which tokens the model chooses along a token tree, and what generate() returns."""
