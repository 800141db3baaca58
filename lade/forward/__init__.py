"""The forward runner: how a block goes through the model."""
