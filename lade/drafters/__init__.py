"""Who proposes guesses: one contract, several drafters. Floor 2."""

from lade.drafters.lookahead import LookaheadDrafter

__all__ = ["LookaheadDrafter"]
