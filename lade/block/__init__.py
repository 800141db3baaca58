"""Blocks: the token tree, their layout, the attention mask and the key/value cache."""
