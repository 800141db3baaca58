"""GPT-2 and its kin: token types, which some of their tokenizers return, are embedded as tokens are and added."""

from __future__ import annotations

from lade.models.base import ModelAdapter


class GPT2Adapter(ModelAdapter):
    """GPT-2, GPT-J, CodeGen and GPTBigCode: a token's type changes that token alone, so that guesses may have one."""

    carried_arguments = frozenset({"token_type_ids"})
