"""Verification: which tokens are chosen along a token tree, and what generate() returns."""
