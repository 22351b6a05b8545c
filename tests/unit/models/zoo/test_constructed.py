"""constructed-induction is what its card says, by interventions with plain hooks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstream.models.decoder import Decoder
from headstream.models.store import load
from headstream.models.zoo.constructed import COPIED_LOGIT, constructed_induction
from headstream.models.zoo.sequences import single_match
from headstream.models.zoo.tasks import pairs_for

HEADS = [(layer, head) for layer in range(2) for head in range(4)]
PREVIOUS, INDUCTION = (0, 1), (1, 2)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return constructed_induction()


def patterns(model: Decoder, tokens: Tensor) -> list[Tensor]:
    _, cache = model.run_with_cache(tokens, backend="naive")
    return [cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(2)]


def replace_z(head: int, value: Tensor | float) -> Callable[..., Tensor]:
    def hook(z: Tensor, hook: Any) -> Tensor:
        out = z.clone()
        out[:, :, head] = value
        return out

    return hook


def prompts(model: Decoder, n: int = 40, length: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Clean prompts, where the earlier A stands, and the answers."""
    generator = torch.Generator().manual_seed(1)
    made = single_match(n, length, model.config.d_vocab - 1, generator=generator)
    return made.tokens, made.earlier, made.tokens[torch.arange(n), made.earlier + 1]


def test_the_checkpoint_is_the_construction_bit_for_bit(model: Decoder) -> None:
    shipped = load("constructed-induction")
    assert shipped.config == model.config
    assert shipped.vocab == model.vocab
    assert shipped.weights_sha256() == model.weights_sha256()
    for name, weight in model.state_dict().items():
        assert torch.equal(shipped.state_dict()[name], weight), name
    assert shipped.card == {**(model.card or {}), "weights_sha256": model.weights_sha256()}


def test_two_builds_are_one(model: Decoder) -> None:
    assert constructed_induction().weights_sha256() == model.weights_sha256()


def test_the_previous_token_head_is_sharp_at_every_position(model: Decoder) -> None:
    length = model.config.n_ctx
    tokens = torch.arange(length).remainder(model.config.d_vocab)[None]
    previous = patterns(model, tokens)[0][0, PREVIOUS[1]]
    assert previous.diagonal(-1).min() > 0.999
    assert previous[0, 0] == 1


def test_the_induction_head_finds_its_target_and_else_rests_on_bos(model: Decoder) -> None:
    tokens, earlier, _ = prompts(model)
    row = torch.arange(len(tokens))
    pattern = patterns(model, tokens)[1][:, INDUCTION[1]]
    assert pattern[row, -1, earlier + 1].min() > 0.999
    assert pattern[:, :-1, 0].min() > 0.999, "no token before the last has occurred before"


def test_the_induced_token_wins_by_the_copied_logit(model: Decoder) -> None:
    tokens, _, answer = prompts(model)
    logits = model(tokens)
    assert torch.isfinite(logits).all()
    last = logits[torch.arange(len(tokens)), -1]
    rest = last.scatter(1, answer[:, None], -torch.inf).max(1).values
    # e^-30 of attention elsewhere, times a logit of 10.
    assert torch.allclose(last.gather(1, answer[:, None])[:, 0] - rest, torch.tensor(COPIED_LOGIT))
    # Without a match nothing is written: all logits are equal.
    assert logits[:, 1:-1].abs().max() < 1e-4


def test_two_matches_share_the_head(model: Decoder) -> None:
    tokens = torch.tensor([[0, 5, 6, 9, 5, 7, 8, 5]])  # A B .. A C .. A
    last = model(tokens)[0, -1]
    assert last[6].item() == pytest.approx(COPIED_LOGIT / 2, abs=1e-4)
    assert last[7].item() == pytest.approx(COPIED_LOGIT / 2, abs=1e-4)


@pytest.mark.parametrize(("layer", "head"), HEADS)
def test_silencing_a_head_kills_the_answer_or_changes_no_bit(
    model: Decoder, layer: int, head: int
) -> None:
    tokens, _, answer = prompts(model)
    row = torch.arange(len(tokens))
    clean = model(tokens)
    hook = (f"blocks.{layer}.attn.hook_z", replace_z(head, 0.0))
    cut = model.run_with_hooks(tokens, fwd_hooks=[hook])
    if (layer, head) in (PREVIOUS, INDUCTION):
        assert (clean[row, -1, answer] - cut[row, -1, answer]).min() > COPIED_LOGIT - 1e-3
    else:
        assert torch.equal(cut, clean)


@pytest.mark.parametrize(
    ("corruption", "expected"),
    [
        ("earlier_query", {PREVIOUS, INDUCTION}),
        ("answer", {INDUCTION}),
        ("last", {INDUCTION}),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_restoring_a_head_finds_the_circuit_that_the_corruption_can_show(
    model: Decoder, corruption: str, expected: set[tuple[int, int]], seed: int
) -> None:
    assert model.card is not None
    pairs = pairs_for(model.card, 24, seed, corruption=corruption)
    row = torch.arange(24)

    def difference(logits: Tensor) -> Tensor:
        last = logits[:, -1]
        return last[row, pairs["answer"]] - last[row, pairs["wrong"]]

    _, cache = model.run_with_cache(pairs["clean"])
    base = difference(model(pairs["corrupted"]))
    gap = difference(model(pairs["clean"])) - base
    assert gap.min() > COPIED_LOGIT - 1e-3
    found = set()
    for layer, head in HEADS:
        name = f"blocks.{layer}.attn.hook_z"
        hook = (name, replace_z(head, cache[name][:, :, head]))
        moved = difference(model.run_with_hooks(pairs["corrupted"], fwd_hooks=[hook])) - base
        if (moved > 0.99 * gap).all():
            found.add((layer, head))
        else:
            # Not one half-found: what is not the circuit moves nothing.
            assert moved.abs().max() < 1e-4
    assert found == expected


def test_its_card_names_the_circuit(model: Decoder) -> None:
    assert model.card is not None
    circuit = model.card["circuit"]
    assert circuit["previous-token"] == ["L0H1"]
    assert circuit["induction"] == ["L1H2"]
    assert len(circuit["idle"]) == 6
