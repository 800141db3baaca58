"""GPT-2 and related families: `token_type_ids`, which some tokenizers return, are embedded and added."""

from __future__ import annotations

from lade.models.base import ModelAdapter


class GPT2Adapter(ModelAdapter):
    """GPT-2, GPT-J, CodeGen and GPTBigCode. A token type affects only its own token, so guesses can carry one."""

    carried_arguments = frozenset({"token_type_ids"})
