"""Text for toys: words, ids, and nothing dropped or added in silence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headstream.models.decoder import Decoder
from headstream.models.errors import HeadstreamError, ShapeError, TokenError
from headstream.models.vocabulary import check_tokens, check_vocabulary, encode

WORDS = ["<bos>", "red", "green", "blue"]


@pytest.fixture
def toy(build: Callable[..., Decoder]) -> Decoder:
    model = build({"d_vocab": 4, "bos_token_id": 0})
    model.vocab = WORDS
    return model


def test_there_and_back(toy: Decoder) -> None:
    tokens = toy.to_tokens("red blue  green\nred")
    assert tokens.tolist() == [[0, 1, 3, 2, 1]]
    assert tokens.dtype == torch.int64
    assert toy.to_string(tokens) == "<bos> red blue green red"
    assert toy.to_string([1, 2]) == "red green"
    assert toy.to_str_tokens(tokens) == ["<bos>", "red", "blue", "green", "red"]
    assert toy.to_str_tokens("red blue") == ["<bos>", "red", "blue"]
    assert toy.to_single_token("blue") == 3
    assert toy.vocab == WORDS


def test_bos_is_added_once_and_never_dropped(toy: Decoder, build: Callable[..., Decoder]) -> None:
    assert toy.to_tokens("<bos> red").tolist() == [[0, 1]]
    assert toy.to_tokens("<bos> red", prepend_bos=True).tolist() == [[0, 1]]
    assert toy.to_tokens("red", prepend_bos=False).tolist() == [[1]]
    assert toy.to_tokens(["red", "<bos> blue"]).tolist() == [[0, 1], [0, 3]]
    # FR-78: without a BOS token nothing is prepended, and the first real token stays.
    bare = build({"d_vocab": 4})
    bare.vocab = WORDS
    assert bare.to_tokens("red blue").tolist() == [[1, 3]]
    assert bare.cfg.default_prepend_bos is False
    assert toy.cfg.default_prepend_bos is True
    with pytest.raises(TokenError, match="prepend_bos=True, but this model has no BOS token"):
        bare.to_tokens("red", prepend_bos=True)


def test_tokens_pass_unchanged(toy: Decoder) -> None:
    tokens = torch.tensor([[1, 2], [3, 3]])
    assert torch.equal(toy.to_tokens(tokens), tokens)
    assert toy.to_tokens(tokens[0]).shape == (1, 2)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("method", "argument", "words"),
    [
        (
            "to_tokens",
            "red grey",
            r"word 1 of the prompt, 'grey', .* strings; nearest is 'green'",
        ),
        ("to_tokens", "red xyz", r"word 1 of the prompt, 'xyz', .*; model.vocab lists them"),
        (
            "to_tokens",
            ["red", "red blue"],
            r"equally long, got lengths \[2, 3\]; pad them",
        ),
        ("to_tokens", [], r"prompts must be non-empty and equally long, got lengths \[\]"),
        ("to_tokens", ["red", 3], r"text must be strings, got int 3; give token ids as a tensor"),
        ("to_tokens", 3, r"text must be strings, got int 3"),
        ("to_tokens", torch.tensor([[4]]), r"tokens\[0, 0\] is 4, outside the vocabulary \[0, 4\)"),
        ("to_single_token", "red blue", r"'red blue' is 2 tokens, expected one"),
        ("to_single_token", "", r"'' is 0 tokens, expected one"),
        ("to_str_tokens", [1, 4], r"tokens\[0, 1\] is 4, outside the vocabulary"),
        ("to_str_tokens", ["red"], r"token ids must be whole numbers, got 'red'"),
        ("to_str_tokens", [1.5], r"token ids must be whole numbers, got 1\.5"),
        ("to_str_tokens", [], r"not empty, got \[0\]"),
        ("to_str_tokens", torch.tensor([[1], [2]]), r"one row of tokens is expected, got 2"),
        ("to_string", torch.tensor([[1], [2]]), r"one row of tokens is expected, got 2"),
        ("tokens_to_residual_directions", -1, r"is -1, outside the vocabulary"),
        ("tokens_to_residual_directions", "grey", r"'grey', is not in the vocabulary"),
    ],
)
def test_text_that_means_nothing(toy: Decoder, method: str, argument: Any, words: str) -> None:
    with pytest.raises(HeadstreamError, match=words):
        getattr(toy, method)(argument)


def test_a_model_without_words(model_a: Decoder) -> None:
    assert model_a.vocab is None
    for method, argument in (
        ("to_tokens", "red"),
        ("to_str_tokens", [1]),
        ("to_string", [1]),
        ("to_single_token", "red"),
    ):
        with pytest.raises(TokenError, match="needs a vocabulary, and this model has none; pass"):
            getattr(model_a, method)(argument)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b"], r"vocabulary has 2 strings, expected d_vocab = 4"),
        (["a", "b", "a", "c"], r"vocabulary\[2\] repeats 'a'; strings must be distinct"),
        (
            ["a", "", "b", "c"],
            r"vocabulary\[1\] must be a non-empty string without white space",
        ),
        (["a", "b c", "d", "e"], r"vocabulary\[1\] must be .*, got 'b c'"),
        (["a", "b", "c", 4], r"vocabulary\[3\] must be .*, got 4"),
        (["a", "b\n", "c", "d"], r"vocabulary\[1\] must be"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_vocabularies_that_cannot_serve(toy: Decoder, words: list[Any], message: str) -> None:
    with pytest.raises(TokenError, match=message):
        check_vocabulary(words, 4)
    with pytest.raises(TokenError, match=message):
        toy.vocab = words
    assert toy.vocab == WORDS


def test_residual_directions(toy: Decoder) -> None:
    W_U = toy.W_U
    assert torch.equal(toy.tokens_to_residual_directions("blue"), W_U[:, 3])
    assert torch.equal(toy.tokens_to_residual_directions(2), W_U[:, 2])
    assert torch.equal(toy.tokens_to_residual_directions(torch.tensor([2])), W_U[:, 2])
    several = toy.tokens_to_residual_directions(torch.tensor([[1, 2]]))
    assert torch.equal(several, W_U.T[torch.tensor([[1, 2]])])


def test_encode_and_check() -> None:
    assert encode(" red  <bos> ", WORDS) == [1, 0]
    assert encode("", WORDS) == []
    assert check_tokens(torch.tensor([1, 2]), 3).tolist() == [[1, 2]]
    with pytest.raises(ShapeError, match=r"clean must be int64 \[batch, pos\], got int32 \[2\]"):
        check_tokens(torch.tensor([1, 2], dtype=torch.int32), 3, argument="clean")
