"""The second metric in words: beside the first, and when it says the opposite."""

from __future__ import annotations

from typing import Any

import pytest

from headstream.analyses.patching.words import opposed, second_effect


def details(name: str = "logit_difference", gap: float = 2.0, refused: str | None = None) -> Any:
    return {
        "metric": {"name": name, "unit": "nats"},
        "second_metric": {"name": "log_prob", "unit": "nats"},
        "gap": {"mean": gap},
        "normalized_refused": refused,
    }


@pytest.mark.parametrize(
    ("name", "gap", "refused", "mean", "second", "against"),
    [
        ("logit_difference", 2.0, None, 1.0, -0.2, True),
        ("logit_difference", 2.0, None, 1.0, 0.2, False),
        # Prints as 0.00: neither way.
        ("logit_difference", 2.0, None, 1.0, -0.004, False),
        # Whichever run is better, both metrics are better the higher.
        ("kl", -2.0, None, -1.0, 0.2, True),
        # A loss that rises and a probability that falls agree.
        ("loss", -2.0, None, 1.0, -0.2, False),
        ("loss", -2.0, None, 1.0, 0.2, True),
        # A function is better towards its clean value, if that can be told.
        ("surprise", -2.0, None, -1.0, 0.2, False),
        ("surprise", 2.0, None, -1.0, 0.2, True),
        ("surprise", 2.0, "within its own noise", -1.0, 0.2, False),
        ("logit_difference", 2.0, None, 1.0, float("nan"), False),
    ],
)
def test_opposed(
    name: str, gap: float, refused: str | None, mean: float, second: float, against: bool
) -> None:
    assert opposed(details(name, gap, refused), mean, second) is against


def test_in_words() -> None:
    assert second_effect(details(), 1.0, 0.534) == "log_prob +0.53 nats"
    assert second_effect(details(), 1.0, -0.534) == "log_prob moves the other way, -0.53 nats"
    assert second_effect(details(), 1.0, float("nan")) == ""
    assert second_effect({**details(), "second_metric": None}, 1.0, 0.5) == ""
