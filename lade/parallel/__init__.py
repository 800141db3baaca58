"""Lookahead parallelism: several processes share the steps of one text."""
