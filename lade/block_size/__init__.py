"""The size of a step's block: what blocks cost on this machine, and which size pays."""
