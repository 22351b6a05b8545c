"""What a patching result says of itself, on arrays typed out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from headstream.analyses.evidence import Evidence
from headstream.analyses.patching.conclusions import (
    causal_cells,
    claims_of,
    random_sites_95,
    warnings_of,
)
from headstream.analyses.patching.result import PatchingResult, ranked_cells, site_label
from headstream.analyses.result import Provenance
from headstream.analyses.stored import load_result

PROVENANCE = Provenance("toy", "00", {}, "naive", "float32", "cpu", 0, {})
# Two layers of two heads: one restores most, one a little but no more than an unrelated prompt's
# values, one works against, one does nothing.
MEAN = np.array([[0.2, 1.6], [-0.8, 0.0]])
N = 8


def details(**changes: Any) -> dict[str, Any]:
    return {
        "site": "z",
        "positions": "all",
        "direction": "denoise",
        "metric": {
            "name": "logit_difference",
            "formula": "logit(answer) - logit(wrong)",
            "unit": "nats",
            "noun": "the answer",
        },
        "family": 3,
        "flips": 256,
        "self_patch_max": 0.0,
        "self_patch_bound": 0.0,
        "random_site_95": None,
        "gap": {"mean": 2.0, "low": 1.5, "high": 2.5, "floor": 0.2, "small": 0},
        "normalized_refused": None,
        "prompts": [],
        **changes,
    }


def arrays(dims: tuple[str, str] = ("layer", "head"), **changes: Any) -> xr.Dataset:
    effects = np.repeat(MEAN[..., None], N, axis=-1)
    fields: dict[str, Any] = {
        "effects": ((*dims, "example"), effects),
        "clean": (("example",), np.full(N, 3.0)),
        "corrupted": (("example",), np.full(N, 1.0)),
        "mean": (dims, MEAN),
        "low": (dims, MEAN - 0.1),
        "high": (dims, MEAN + 0.1),
        "normalized": (dims, MEAN / 2),
        "normalized_low": (dims, MEAN / 2 - 0.05),
        "normalized_high": (dims, MEAN / 2 + 0.05),
        "p_value": (dims, np.array([[0.04, 0.01], [0.01, np.nan]])),
        "q_value": (dims, np.array([[0.04, 0.02], [0.02, np.nan]])),
        "unrelated": (dims, np.array([[0.3, -0.5], [0.1, 0.0]])),
        "second": (dims, MEAN / 3),
    }
    fields.update({name: (dims, value) for name, value in changes.items()})
    coords = {dims[0]: [0, 1], dims[1]: [0, 1], "example": np.arange(N)}
    return xr.Dataset(fields, coords=coords)


def result(data: xr.Dataset | None = None, **changes: Any) -> PatchingResult:
    words = details(**changes)
    found = arrays() if data is None else data
    found["causal"] = causal_cells(found, words)
    words["random_site_95"] = random_sites_95(found)
    words["warnings"] = warnings_of(found, words)
    return PatchingResult("Patching", found, PROVENANCE, claims_of(found, words), words)


class TestLabels:
    def test_by_the_rule(self) -> None:
        assert result().data["causal"].values.tolist() == [[False, True], [True, False]]

    def test_claims_in_signed_order_with_reasons(self) -> None:
        found = [(c.id, c.statement, str(c.evidence), c.value) for c in result().claims]
        assert found == [
            ("self_patch.z", "patching a run with its own z changes nothing", "PROVEN", 0.0),
            ("z.L0H1", "z of L0H1 restores the answer", "CAUSAL", 0.8),
            ("z.L0H0", "z of L0H0 restores part of the answer", "UNKNOWN", 0.1),
            ("z.L1H0", "z of L1H0 pushes away from the answer", "CAUSAL", -0.4),
        ]
        reasons = {claim.id: claim.reason for claim in result().claims}
        assert reasons["z.L0H1"] == (
            "p = 0.01 (sign-flip, maximum over 3 sites); +1.60 nats, "
            "with an unrelated prompt's values -0.50"
        )
        assert reasons["z.L0H0"] == (
            "values of an unrelated prompt do as much: +0.30 nats against +0.20"
        )

    def test_the_second_metric_is_said_and_when_it_disagrees(self) -> None:
        second = {"name": "log_prob", "unit": "nats"}
        # One labelled site of two moves log_prob the other way, and so does one without a label.
        data = arrays(second=np.array([[-0.3, 0.5], [0.25, 0.0]]))
        found = result(data, second_metric=second)
        reasons = {claim.id: claim.reason for claim in found.claims}
        assert reasons["z.L0H1"].endswith("values -0.50; log_prob +0.50 nats")
        assert reasons["z.L1H0"].endswith("; log_prob moves the other way, +0.25 nats")
        assert reasons["z.L0H0"].endswith(
            " against +0.20; log_prob moves the other way, -0.30 nats"
        )
        assert found.details["warnings"][-1] == (
            "the second metric, log_prob, moves the other way at 1 of 2 labelled sites"
        )
        agreeing = result(arrays(), second_metric=second)
        assert "log_prob" not in {c.id: c.reason for c in agreeing.claims}["z.L0H0"]
        assert not any("log_prob" in words for words in agreeing.details["warnings"])

    def test_q_gates_nothing(self) -> None:
        data = arrays(p_value=np.full((2, 2), 0.06), q_value=np.full((2, 2), 0.001))
        assert not result(data).data["causal"].any()
        data = arrays(q_value=np.full((2, 2), 0.9))
        assert result(data).data["causal"].values.tolist() == [[False, True], [True, False]]

    def test_a_site_without_a_share_is_told_in_nats(self) -> None:
        """Its own pairs' gap is within its noise, though that of all pairs is not."""
        shares = np.array([[0.1, np.nan], [-0.4, 0.0]])
        found = result(arrays(normalized=shares))
        claim = {c.id: c for c in found.claims}["z.L0H1"]
        assert (claim.value, claim.unit) == (1.6, "nats")
        assert claim.statement == "z of L0H1 moves the answer"
        assert found.summary().startswith(
            "One head pushes away from the answer: L1H0 (-0.40 [-0.45, -0.35] of the gap); "
            "one head moves the answer: L0H1 (+1.60 [1.50, 1.70] nats)"
        )

    def test_noise_needs_and_works_against(self) -> None:
        statements = {c.id: c.statement for c in result(direction="noise").claims}
        assert statements["z.L0H1"] == "z of L0H1 is needed for the answer"
        assert statements["z.L1H0"] == "z of L1H0 works against the answer"

    def test_only_the_largest_few_without_a_label_are_named(self) -> None:
        data = arrays(p_value=np.full((2, 2), 0.5), mean=np.array([[0.2, -1.6], [0.8, 0.4]]))
        unknown = [c.id for c in result(data).claims if c.evidence is Evidence.UNKNOWN]
        assert sorted(unknown) == ["z.L0H1", "z.L1H0", "z.L1H1"]

    def test_effects_below_a_twentieth_of_the_gap_are_not_named(self) -> None:
        # The mean gap is 2 nats: 0.1 is just notable, 0.09 is not.
        mean = np.array([[1.9e-6, 0.1], [-0.09, 0.0]])
        data = arrays(mean=mean, p_value=np.full((2, 2), 0.5))
        found = result(data)
        unknown = [c for c in found.claims if c.evidence is Evidence.UNKNOWN]
        assert [c.id for c in unknown] == ["z.L0H1"]
        assert "more pairs would settle it" in unknown[0].reason

    def test_without_a_gap_notable_is_a_twentieth_of_the_largest_effect(self) -> None:
        nothing = np.full((2, 2), np.nan)
        data = arrays(
            mean=np.array([[-4.0, 0.2], [0.19, 0.0]]),
            p_value=np.full((2, 2), 0.5),
            **dict.fromkeys(("normalized", "normalized_low", "normalized_high"), nothing),
        )
        found = result(data, normalized_refused="within its own noise")
        unknown = [c.id for c in found.claims if c.evidence is Evidence.UNKNOWN]
        assert unknown == ["z.L0H1", "z.L0H0"]

    def test_effects_that_are_only_rounding_are_not_named(self) -> None:
        nothing = np.full((2, 2), np.nan)
        data = arrays(
            mean=np.full((2, 2), 1e-7),
            p_value=nothing,
            **dict.fromkeys(("normalized", "normalized_low", "normalized_high"), nothing),
        )
        (held,) = result(data, normalized_refused="within its own noise").claims
        assert held.id == "self_patch.z"

    def test_a_failed_self_patch_is_the_alarm(self) -> None:
        alarmed = result(self_patch_max=0.5)
        assert [str(c.evidence) for c in alarmed.claims if c.evidence.name != "UNKNOWN"] == [
            "FAILED"
        ]
        assert alarmed.details["warnings"] == [
            "8 pairs: 95% intervals cover 0.85 to 0.95, less where few pairs carry the effect",
            "the self-patch control failed: 5.0e-01 is over 0.0e+00",
        ]

    @pytest.mark.parametrize(
        ("n", "words"),
        [
            (1, "one pair is a demonstration: no interval, no p-value, no label"),
            (5, "5 pairs: effects and their ranges only, no p-value and no label below 6"),
            (
                6,
                "6 pairs: 95% intervals cover 0.81 to 0.95, less where few pairs carry the effect",
            ),
            (
                16,
                "16 pairs: 95% intervals cover 0.89 to 0.95, less where few pairs carry the effect",
            ),
            (
                32,
                "32 pairs: 95% intervals cover 0.93 to 0.95, less where few pairs carry the effect",
            ),
            (
                63,
                "63 pairs: 95% intervals cover 0.93 to 0.95, less where few pairs carry the effect",
            ),
            (64, None),
        ],
    )
    def test_few_pairs_are_said(self, n: int, words: str | None) -> None:
        data = arrays().drop_dims("example")
        effects = np.repeat(MEAN[..., None], n, axis=-1)
        data["effects"] = (("layer", "head", "example"), effects)
        data["causal"] = data["mean"] > 9
        assert warnings_of(data, details()) == ([] if words is None else [words])

    def test_sites_of_few_pairs_are_counted(self) -> None:
        data = arrays()
        data["effects"] = data["effects"].copy()
        data["effects"][0, 1, 5:] = np.nan
        words = "1 site is in fewer than 6 pairs: a range, no p-value and no label"
        assert words in result(data).details["warnings"]
        data["effects"][0, 0, 3:] = np.nan
        data["effects"][1, 1, :] = np.nan  # patched in no pair: no site at all
        assert "2 sites are in fewer" in result(data).details["warnings"][1]

    @pytest.mark.parametrize(
        ("flips", "exact", "smallest"),
        [(18, False, "0.053"), (32, True, "0.062"), (1, False, "0.5")],
    )
    def test_too_few_flips_for_any_label_are_said(
        self, flips: int, exact: bool, smallest: str
    ) -> None:
        found = result(flips=flips, flips_exact=exact).details["warnings"]
        pattern = "pattern" if flips == 1 else "patterns"
        words = f"{flips} sign {pattern}: the smallest p is {smallest}, so no label is possible"
        assert words in found
        for enough in ({"flips": 19, "flips_exact": False}, {"flips": 64, "flips_exact": True}):
            assert not any("smallest p" in text for text in result(**enough).details["warnings"])

    def test_random_sites_are_outside_the_claimed_set(self) -> None:
        # |0.2| and 0: the 95th percentile of two numbers is 0.95 of the way.
        assert result().controls["random_site_95"] == pytest.approx(0.19)
        everything = arrays(
            mean=np.ones((2, 2)), p_value=np.full((2, 2), 0.01), unrelated=np.zeros((2, 2))
        )
        assert result(everything).controls["random_site_95"] is None


class TestSummary:
    def test_for_and_against(self) -> None:
        assert result().summary() == (
            "One head restores the answer: L0H1 (+0.80 [0.75, 0.85] of the gap); "
            "one head pushes away from the answer: L1H0 (-0.40 [-0.45, -0.35] of the gap); "
            "not told from an unrelated prompt's values: L0H0 (+0.10) (n = 8)"
        )
        assert repr(result()).startswith("<patching: One head restores")

    def test_many_are_cut_short(self) -> None:
        values = np.array([[1.0, 0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, 0.2, 0.1]])
        dims, both = ("layer", "pos"), ("layer", "pos", "example")
        data = xr.Dataset(
            dict.fromkeys(("mean", "low", "high", "normalized", "normalized_low"), (dims, values))
            | {
                "normalized_high": (dims, values + 0.1),
                "effects": (both, np.repeat(values[..., None], 6, -1)),
                "p_value": (dims, np.full((2, 5), 0.01)),
                "unrelated": (dims, np.zeros((2, 5))),
            },
            coords={"layer": [0, 1], "pos": [4, 5, 6, 7, 8]},
        )
        assert result(data, site="resid_pre").summary() == (
            "Six sites restore the answer: L0@4 (+1.00 [1.00, 1.10] of the gap), "
            "L0@5 (+0.90 [0.90, 1.00] of the gap), L0@6 (+0.80 [0.80, 0.90] of the gap), "
            "L0@7 (+0.70 [0.70, 0.80] of the gap), L0@8 (+0.60 [0.60, 0.70] of the gap), "
            "L1@4 (+0.50 [0.50, 0.60] of the gap); four more restore part of it: "
            "L1@5 (+0.40 [0.40, 0.50] of the gap), L1@6 (+0.30 [0.30, 0.40] of the gap), "
            "2 others (n = 6)"
        )

    @pytest.mark.parametrize(
        ("direction", "whole", "part"),
        [
            ("denoise", "One head restores the answer", "one more restores part of it"),
            ("noise", "One head is needed for the answer", "one more is partly needed for it"),
        ],
    )
    def test_what_does_it_in_part_is_told_apart(
        self, direction: str, whole: str, part: str
    ) -> None:
        """The verb of the headline is that of the claims: half of the gap parts them."""
        share = np.array([[0.37, 0.76], [0.0, 0.0]])
        data = arrays(
            mean=(1 if direction == "denoise" else -1) * 2 * share,
            normalized=share,
            p_value=np.array([[0.01, 0.01], [np.nan, np.nan]]),
            unrelated=np.zeros((2, 2)),
        )
        found = result(data, direction=direction)
        before, after = found.summary().split("; ")
        assert before.startswith(f"{whole}: L0H1 (+0.76 ")
        assert after.startswith(f"{part}: L0H0 (+0.37 ")
        statements = {claim.id: claim.statement for claim in found.claims}
        assert "part" not in statements["z.L0H1"]
        assert "part" in statements["z.L0H0"]

    def test_an_unmoved_metric_beside_a_second_that_moves(self) -> None:
        """Zero is said of the metric alone: the answer's probability may move."""
        nothing = np.zeros((2, 2))
        changes = dict(
            mean=nothing, normalized=nothing, unrelated=nothing, p_value=np.full((2, 2), np.nan)
        )
        second = {"name": "log_prob", "unit": "nats"}
        data = arrays(**changes, second=np.array([[0.0, -0.2], [4.858, 0.0]]))
        data["effects"] = 0 * data["effects"]
        found = result(data, second_metric=second)
        assert found.summary().endswith(
            "; every effect is zero, but log_prob moves by up to +4.86 nats (n = 8)"
        )
        assert found.details["warnings"][-1] == (
            "every effect is exactly zero; no one of these values moves the metric; "
            "its second metric, log_prob, moves by up to +4.86 nats"
        )
        data = arrays(**changes, second=np.full((2, 2), 0.004))
        data["effects"] = 0 * data["effects"]
        still = result(data, second_metric=second)
        assert still.summary().endswith("; every effect is zero (n = 8)")
        assert still.details["warnings"][-1].endswith("no one of these values moves the metric")

    def test_none(self) -> None:
        data = arrays(p_value=np.full((2, 2), 0.5))
        assert result(data).summary() == (
            "No head of 4 is shown to restore the answer; "
            "largest L0H1 (+0.80 [0.75, 0.85] of the gap) (n = 8)"
        )
        assert "is shown to be needed for the answer" in result(data, direction="noise").summary()

    def test_without_a_gap_in_nats(self) -> None:
        data = arrays(**{k: np.full((2, 2), np.nan) for k in ("normalized", "normalized_low")})
        assert result(data, normalized_refused="within its own noise").summary() == (
            "Two heads move the answer: L0H1 (+1.60 [1.50, 1.70] nats), "
            "L1H0 (-0.80 [-0.90, -0.70] nats); "
            "not told from an unrelated prompt's values: L0H0 (+0.20 nats) (n = 8)"
        )

    def test_the_largest_effect_is_named_though_the_control_excludes_it(self) -> None:
        # Noising: L0H0 breaks the answer entirely, and so does any other prompt's value.
        mean = np.array([[-2.0, -1.6], [-1.4, 0.0]])
        data = arrays(
            mean=mean,
            normalized=-mean / 2,
            p_value=np.array([[0.01, 0.01], [0.01, np.nan]]),
            unrelated=np.array([[-2.1, -0.2], [-1.4, 0.0]]),
        )
        assert (
            result(data, direction="noise")
            .summary()
            .endswith(
                "; not told from an unrelated prompt's values: L0H0 (+1.00), L1H0 (+0.70) (n = 8)"
            )
        )

    def test_only_sites_that_the_control_excludes(self) -> None:
        data = arrays(unrelated=2 * MEAN)
        assert result(data).summary() == (
            "Three heads of 4 move the answer, but no more than an unrelated prompt's values: "
            "L0H1 (+0.80), L0H0 (+0.10), L1H0 (-0.40) (n = 8)"
        )
        # With the control in ruins nothing passes anything.
        assert "unrelated" not in result(data, self_patch_max=0.5).summary()

    def test_many_excluded_sites_are_cut_short(self) -> None:
        values = np.linspace(1.0, 0.1, 10).reshape(2, 5)
        dims, both = ("layer", "pos"), ("layer", "pos", "example")
        names = ("mean", "low", "high", "normalized", "normalized_low", "normalized_high")
        data = xr.Dataset(
            dict.fromkeys((*names, "unrelated"), (dims, values))
            | {
                "effects": (both, np.repeat(values[..., None], 6, -1)),
                "p_value": (dims, np.full((2, 5), 0.01)),
            },
            coords={"layer": [0, 1], "pos": [4, 5, 6, 7, 8]},
        )
        assert result(data, site="resid_pre").summary().endswith("L1@6 (+0.30), 2 more (n = 6)")

    @pytest.mark.parametrize(
        ("direction", "words"),
        [
            ("denoise", "One head restores part of the answer: L0H1 (+0.02 "),
            ("noise", "One head is partly needed for the answer: L0H1 (+0.02 "),
        ],
    )
    def test_a_tiny_effect_is_a_part(self, direction: str, words: str) -> None:
        sign = 1.0 if direction == "denoise" else -1.0
        share = np.array([[0.0, 0.02], [0.0, 0.0]])
        data = arrays(
            mean=sign * 2 * share,
            normalized=share,
            p_value=np.array([[np.nan, 0.01], [np.nan, np.nan]]),
            unrelated=np.zeros((2, 2)),
        )
        found = result(data, direction=direction)
        assert found.summary().startswith(words)
        assert found.claims[1].evidence is Evidence.CAUSAL
        assert " part" in found.claims[1].statement

    def test_half_of_the_gap_is_no_part(self) -> None:
        data = arrays(normalized=np.array([[0.1, 0.5], [-0.4, 0.0]]))
        assert result(data).summary().startswith("One head restores the answer: L0H1 (+0.50 ")
        data = arrays(normalized=np.array([[0.1, 0.49], [-0.4, 0.0]]))
        assert result(data).summary().startswith("One head restores part of the answer: L0H1")

    def test_key_value_heads_are_named_so(self) -> None:
        assert (
            result(arrays(("layer", "kv_head")))
            .summary()
            .startswith("One key/value head restores the answer: L0KV1")
        )


class TestArrays:
    def test_properties(self) -> None:
        found = result()
        assert found.interval.dims == ("layer", "head", "end")
        assert found.interval.sel(layer=0, head=1).values.tolist() == [1.5, 1.7000000000000002]
        assert found.interval.sel(end="low").values.tolist() == found.data["low"].values.tolist()
        assert (
            found.normalized_interval.sel(end="high", layer=0, head=1).item() == 0.8500000000000001
        )
        assert found.mean.equals(found.data["mean"])
        assert found.q_value.equals(found.data["q_value"])
        assert found.controls["clean"] == 3.0
        assert found.controls["corrupted"] == 1.0
        assert found.controls["gap"]["mean"] == 2.0

    def test_shares_are_per_prompt(self) -> None:
        data = arrays()
        data["corrupted"] = ("example", np.array([1.0] * 6 + [2.9, -1.0]))
        shares = result(data).shares.sel(layer=0, head=1)
        # 1.6 of a gap of 2 in six prompts, of 4 in one; the gap of 0.1 is under the floor of 0.2.
        assert shares["median"].item() == pytest.approx(0.8)
        assert shares["low_quartile"].item() == pytest.approx(0.8)
        noise = result(data, direction="noise").shares.sel(layer=0, head=1)
        assert noise["median"].item() == pytest.approx(-0.8)

    def test_frame_has_one_row_a_site(self) -> None:
        frame = result().to_frame()
        assert len(frame) == 4
        assert list(frame.columns[:3]) == ["layer", "head", "mean"]
        assert "effects" not in frame.columns

    def test_ranking_is_signed(self) -> None:
        assert [
            cell.label for cell in ranked_cells(arrays().assign(causal=arrays()["mean"] > 9))
        ] == [
            "L0H1",
            "L0H0",
            "L1H1",
            "L1H0",
        ]

    def test_labels_of_sites(self) -> None:
        assert site_label({"layer": 1, "head": 4}) == "L1H4"
        assert site_label({"layer": 1, "kv_head": 0, "pos": -1}) == "L1KV0@-1"
        assert site_label({"layer": 0, "role": "query"}) == "L0@query"
        assert site_label({"layer": 2}) == "L2"


class TestFile:
    def test_round_trip(self, tmp_path: Path) -> None:
        found = result()
        loaded = load_result(found.save(tmp_path / "patching.json"))
        assert isinstance(loaded, PatchingResult)
        assert loaded.to_json() == found.to_json()
        assert loaded.summary() == found.summary()
        assert loaded.data["causal"].dtype == np.bool_
        # Stored as the shortest float32.
        np.testing.assert_allclose(loaded.effects, found.effects, rtol=1e-7)
        assert np.isnan(loaded.p_value.values[1, 1])
        assert "NaN" not in json.dumps(found.to_json())

    def test_roles_keep_their_names(self, tmp_path: Path) -> None:
        data = arrays(("layer", "role")).assign_coords(role=["query", "source"])
        loaded = load_result(result(data, site="resid_pre").save(tmp_path / "roles.json"))
        assert loaded.data["role"].values.tolist() == ["query", "source"]
        assert [c.id for c in loaded.claims][1] == "resid_pre.L0@source"

    def test_it_is_read_without_torch(self, tmp_path: Path) -> None:
        path = result().save(tmp_path / "patching.json")
        code = (
            "import sys; from headstream.analyses.stored import load_result; "
            f"text = load_result({str(path)!r}).summary(); "
            "assert 'torch' not in sys.modules; print(text)"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert ran.stdout.startswith("One head restores the answer")
