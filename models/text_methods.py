"""A decoder's text methods: a list of strings in the place of TransformerLens' tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headstream.models.errors import ShapeError, TokenError
from headstream.models.vocabulary import check_tokens, check_vocabulary, encode
from headstream.models.weight_views import WeightViews


class TextMethods(WeightViews):
    """Text to tokens and back, under TransformerLens' names."""

    _vocab: list[str] | None

    @property
    def vocab(self) -> list[str] | None:
        """The strings of the tokens, or None. Setting it checks length and distinctness."""
        return self._vocab

    @vocab.setter
    def vocab(self, words: Sequence[str] | None) -> None:
        self._vocab = None if words is None else check_vocabulary(words, self.config.d_vocab)

    def to_tokens(
        self, text: str | Sequence[str] | Tensor, prepend_bos: bool | None = None
    ) -> Tensor:
        """Text as int64 `[batch, pos]`: words separated by spaces, one prompt a string.

        Args:
            text: a prompt, or several of equal length. Tokens pass unchanged.
            prepend_bos: None prepends the BOS token if the model has one and the prompt does not
                already start with it; nothing is ever dropped.
        Raises:
            TokenError: without a vocabulary, on a word outside it, or on ragged prompts.
        """
        if isinstance(text, Tensor):
            return check_tokens(text, self.config.d_vocab)
        several = isinstance(text, Sequence) and not isinstance(text, str)
        prompts: list[Any] = list(text) if several else [text]
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise TokenError(
                    f"text must be strings, got {type(prompt).__name__} {prompt!r}",
                    hint="give token ids as a tensor: torch.tensor(ids)",
                )
        bos = self.config.bos_token_id
        if prepend_bos and bos is None:
            raise TokenError("prepend_bos=True, but this model has no BOS token")
        rows = [encode(prompt, self._words("to_tokens")) for prompt in prompts]
        if bos is not None and prepend_bos is not False:
            rows = [row if row[:1] == [bos] else [bos, *row] for row in rows]
        lengths = sorted({len(row) for row in rows})
        if len(lengths) != 1 or lengths == [0]:
            raise TokenError(
                f"prompts must be non-empty and equally long, got lengths {lengths}",
                hint="pad them yourself and pass attention_mask",
            )
        return torch.tensor(rows, device=self.device)

    def to_string(self, tokens: Tensor | Sequence[int]) -> str:
        """One row of tokens as text."""
        return " ".join(self.to_str_tokens(tokens))

    def to_str_tokens(self, tokens: Tensor | Sequence[int] | str) -> list[str]:
        """The strings of one row of tokens (or of a prompt, BOS included)."""
        if isinstance(tokens, str):
            tokens = self.to_tokens(tokens)
        if not isinstance(tokens, Tensor):
            tokens = torch.tensor(_whole_numbers(tokens), dtype=torch.int64)
        rows = check_tokens(tokens, self.config.d_vocab)
        if rows.shape[0] != 1:
            raise ShapeError(f"one row of tokens is expected, got {rows.shape[0]}")
        words = self._words("to_str_tokens")
        return [words[token] for token in rows[0].tolist()]

    def to_single_token(self, word: str) -> int:
        """The token of one word."""
        ids = encode(word, self._words("to_single_token"))
        if len(ids) != 1:
            raise TokenError(f"{word!r} is {len(ids)} tokens, expected one")
        return ids[0]

    def tokens_to_residual_directions(
        self, tokens: str | int | Tensor
    ) -> Float[Tensor, "*tokens d_model"]:
        """The columns of W_U for `tokens`: the directions that raise their logits."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        index = torch.as_tensor(tokens, device=self.device)
        check_tokens(index.flatten(), self.config.d_vocab)
        out: Tensor = self.W_U.T[index]
        # TransformerLens gives one direction, not a stack of one, for a single token.
        return out[0] if index.ndim and index.numel() == 1 else out

    def _words(self, method: str) -> list[str]:
        if self.vocab is None:
            raise TokenError(
                f"{method} needs a vocabulary, and this model has none",
                hint="pass token ids, or set model.vocab",
            )
        return self.vocab


def _whole_numbers(ids: Sequence[int]) -> list[int]:
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TokenError(f"token ids must be whole numbers, got {value!r}")
    return [int(value) for value in ids]
