"""`patch` on small random decoders: identities, controls, labels, padding, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstream.analyses.evidence import Evidence
from headstream.analyses.patching.inference import partners, sign_flips
from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.result import PatchingResult
from headstream.analyses.patching.sites import SITES
from headstream.analyses.patching.task import Task
from headstream.analyses.stored import load_result
from headstream.models.decoder import Decoder
from headstream.models.errors import BackendError, HookError, ShapeError, TaskError, TokenError

MakeTask = Callable[..., Task]


def claims(result: PatchingResult, evidence: Evidence) -> list[str]:
    return [claim.id for claim in result.claims if claim.evidence is evidence]


class TestIdentities:
    @pytest.mark.parametrize("site", sorted(SITES))
    def test_self_patch_is_zero_to_the_bit(
        self, model: Decoder, make_task: MakeTask, site: str
    ) -> None:
        """FR-40: every site, layer, head and position, by the definition on naive."""
        task = make_task(model, 3, length=4)
        few = [1, 2] if SITES[site].heads == "neuron" else None
        result = patch(model, task, site, positions="each", heads=few, n_flips=1, engine="hooks")
        assert result.details["self_patch_max"] == 0.0
        assert result.details["self_patch_bound"] == 0.0
        claim = result.claims[0]
        assert (claim.id, claim.evidence) == (f"self_patch.{site}", Evidence.PROVEN)

    @pytest.mark.parametrize("site", sorted(SITES))
    def test_self_patch_is_rounding_in_the_suffix_engine(
        self, model: Decoder, make_task: MakeTask, site: str
    ) -> None:
        result = patch(model, make_task(model, 3, length=4), site, positions="each", n_flips=1)
        gap = result.details["self_patch_bound"] / 1e-4
        assert gap == pytest.approx(float(np.abs(result.clean - result.corrupted).mean()))
        # A few roundings of float32, a tenth of what is allowed.
        assert result.details["self_patch_max"] <= 1e-5 * gap

    @pytest.mark.parametrize("direction", ["denoise", "noise"])
    @pytest.mark.parametrize("n", [1, 16])
    def test_the_whole_first_stream_is_the_whole_gap(
        self, model: Decoder, make_task: MakeTask, direction: str, n: int
    ) -> None:
        """FR-41."""
        result = patch(
            model,
            make_task(model, n),
            "resid_pre",
            direction=direction,
            positions="all",
            engine="hooks",
        )
        assert result.normalized.dims == ("layer",)
        # The same numbers flow from layer 0 on, so nothing is rounded differently.
        assert result.normalized.sel(layer=0).item() == pytest.approx(1.0, abs=1e-15)
        sign = 1 if direction == "denoise" else -1
        gap = result.clean.values - result.corrupted.values
        assert result.effects.sel(layer=0).values.tolist() == (sign * gap).tolist()
        if n > 1:
            ends = result.normalized_interval.sel(layer=0).values
            assert ends.tolist() == pytest.approx([1.0, 1.0], abs=1e-12)

    def test_nothing_moves_outside_the_causal_cone(
        self, model: Decoder, make_task: MakeTask
    ) -> None:
        """Right of the answer position nothing can reach it; left of the change nothing differs."""
        task = make_task(model, 8, changed=2, answer_pos=4)
        effects = patch(model, task, "resid_pre").effects
        assert (effects.sel(pos=[5, 6]) == 0).all()
        assert (effects.sel(pos=[0, 1]) == 0).all()
        assert (effects.sel(layer=0, pos=2) != 0).all()
        assert (effects.sel(layer=1, pos=4) != 0).any()

    def test_swapped_runs_are_the_other_direction(
        self, model: Decoder, make_task: MakeTask
    ) -> None:
        """FR-46: noise is denoise of the swapped pair, on the same scale."""
        task = make_task(model, 8)
        swapped = Task(task.corrupted, task.clean, task.answer, task.wrong)
        noise = patch(model, task, "z", direction="noise")
        mirrored = patch(model, swapped, "z")
        assert noise.effects.values.tolist() == mirrored.effects.values.tolist()
        np.testing.assert_allclose(noise.normalized, mirrored.normalized, rtol=1e-12)
        assert noise.p_value.values.tolist() == mirrored.p_value.values.tolist()
        assert noise.details["direction"] == "noise"

    def test_effects_are_differences_of_the_metric(
        self, model: Decoder, make_task: MakeTask
    ) -> None:
        task = make_task(model, 5, metric="prob")
        result = patch(model, task, "attn_out", layers=[1], positions=[6])
        with torch.no_grad():
            runs = [
                model(rows)[:, -1].double().softmax(-1) for rows in (task.clean, task.corrupted)
            ]
        clean, corrupted = (run.gather(1, task.answer[:, None])[:, 0].numpy() for run in runs)
        assert result.clean.values.tolist() == clean.tolist()
        assert result.corrupted.values.tolist() == corrupted.tolist()
        np.testing.assert_allclose(
            result.normalized.item(),
            result.effects.mean() / (clean.mean() - corrupted.mean()),
            rtol=1e-12,
        )

    def test_flash_and_auto_give_the_definitions_numbers(
        self, model: Decoder, make_task: MakeTask
    ) -> None:
        task = make_task(model, 6)
        naive = patch(model, task, "z")
        for backend in ("flash", "auto"):
            result = patch(model, task, "z", backend=backend)
            # float32, logits of unit scale.
            np.testing.assert_allclose(result.effects, naive.effects, atol=2e-5)
            assert result.details["self_patch_bound"] > 0
            # A few roundings of logits of unit scale.
            assert result.details["self_patch_max"] <= 2e-6
            assert result.provenance.backend == backend

    def test_the_model_is_left_as_it_was(self, model: Decoder, make_task: MakeTask) -> None:
        task = make_task(model, 3)
        before = model.weights_sha256()
        patch(model, task, "z", n_flips=1)
        assert model.hooks_active() == 0
        assert model.weights_sha256() == before
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_the_same_seed_gives_the_same_result(self, model: Decoder, make_task: MakeTask) -> None:
        task = make_task(model, 16)
        first, again, other = (patch(model, task, "z", seed=seed, layers=[1]) for seed in (0, 0, 1))
        assert first.to_json() == again.to_json()
        assert other.effects.values.tolist() == first.effects.values.tolist()
        assert other.data["unrelated"].values.tolist() != first.data["unrelated"].values.tolist()


class TestAxes:
    def test_grouped_heads_have_their_own_axis(self, grouped: Decoder, make_task: MakeTask) -> None:
        """FR-44."""
        task = make_task(grouped, 8)
        for site in ("k", "v"):
            result = patch(grouped, task, site)
            assert result.effects.dims == ("layer", "kv_head", "example")
            assert result.effects.shape == (2, 2, 8)
        assert patch(grouped, task, "q").effects.dims == ("layer", "head", "example")
        with pytest.raises(TaskError, match="query head 3 reads key/value head 1"):
            patch(grouped, task, "k", heads=[3])

    def test_roles_follow_each_row(self, model: Decoder, make_task: MakeTask) -> None:
        plain = make_task(model, 8)
        place = torch.tensor([2, 3, 2, 5, 2, 6, 2, 2])
        task = Task(
            plain.clean,
            plain.corrupted,
            plain.answer,
            plain.wrong,
            roles={"mixed": place, "last": -1},
        )
        by_role = patch(model, task, "resid_mid", positions="roles").effects
        by_pos = patch(model, task, "resid_mid", positions="each").effects
        assert by_role["role"].values.tolist() == ["mixed", "last"]
        np.testing.assert_allclose(by_role.sel(role="last"), by_pos.sel(pos=6), atol=1e-5)
        for row, pos in enumerate(place.tolist()):
            ours = by_role.sel(role="mixed", example=row)
            # Other rows beside it: float32 rounding at unit scale.
            np.testing.assert_allclose(ours, by_pos.sel(pos=pos, example=row), atol=1e-5)

    def test_restricted_cells_are_those_of_the_full_grid(
        self, model: Decoder, make_task: MakeTask
    ) -> None:
        task = make_task(model, 4, length=4)
        full = patch(model, task, "z", positions="each").effects
        part = patch(model, task, "z", layers=[1], heads=[2, 0], positions=[2, -1]).effects
        assert part.sizes == {"layer": 1, "head": 2, "pos": 2, "example": 4}
        assert (part.sel(head=2, pos=2) == full.sel(layer=1, head=2, pos=2)).all()
        assert (part.sel(head=0, pos=-1) == full.sel(layer=1, head=0, pos=3)).all()


def padded(task: Task, lengths: list[int], side: str) -> Task:
    """The same prompts cut to `lengths` and padded on one side with a token that matters."""
    longest = max(lengths)
    clean = torch.full((len(lengths), longest), 9)
    corrupted = torch.full((len(lengths), longest), 9)
    mask = torch.zeros(len(lengths), longest, dtype=torch.int64)
    for row, length in enumerate(lengths):
        at = slice(longest - length, longest) if side == "left" else slice(0, length)
        clean[row, at] = task.clean[row, :length]
        corrupted[row, at] = task.corrupted[row, :length]
        mask[row, at] = 1
    return Task(
        clean,
        corrupted,
        task.answer,
        task.wrong,
        attention_mask=mask,
        roles={"first": 0, "last": -1},
    )


@pytest.mark.parametrize("which", ["model", "grouped"])
class TestPadding:
    """FR-43: positions are row-wise real positions, on either side and alone."""

    LENGTHS = [2, 3, 4]
    FEW = {"resid_pre": None, "z": [0, 3]}  # heads, to keep it quick

    @pytest.fixture
    def decoder(self, which: str, request: pytest.FixtureRequest) -> Decoder:
        found = request.getfixturevalue(which)
        assert isinstance(found, Decoder)
        return found

    @pytest.mark.parametrize(("site", "positions"), [("resid_pre", "each"), ("z", "all")])
    def test_left_right_and_solo_agree(
        self, decoder: Decoder, make_task: MakeTask, site: str, positions: str
    ) -> None:
        task = make_task(decoder, 3, length=4, changed=1)
        left, right = (
            patch(
                decoder,
                padded(task, self.LENGTHS, side),
                site,
                positions=positions,
                heads=self.FEW[site],
            )
            for side in ("left", "right")
        )
        # float32 at unit scale: batches of another layout round differently.
        np.testing.assert_allclose(left.effects, right.effects, atol=1e-5)
        for row, length in enumerate(self.LENGTHS):
            alone = Task(
                task.clean[row, :length],
                task.corrupted[row, :length],
                task.answer[row : row + 1],
                task.wrong[row : row + 1] if task.wrong is not None else None,
            )
            solo = patch(decoder, alone, site, positions=positions, heads=self.FEW[site])
            expected = solo.effects.isel(example=0)
            ours = left.effects.isel(example=row)
            if positions == "each":
                assert np.isnan(ours.sel(pos=slice(length, None))).all()
                ours = ours.sel(pos=slice(0, length - 1))
            np.testing.assert_allclose(ours, expected, atol=1e-5)

    def test_first_and_last_by_index_and_by_role(
        self, decoder: Decoder, make_task: MakeTask
    ) -> None:
        task = padded(make_task(decoder, 3, length=4, changed=0), self.LENGTHS, "left")
        listed = patch(decoder, task, "resid_post", positions=[0, -1]).effects
        roles = patch(decoder, task, "resid_post", positions="roles").effects
        assert (listed.sel(pos=0) == roles.sel(role="first")).all()
        assert (listed.sel(pos=-1) == roles.sel(role="last")).all()
        assert (roles.sel(role="first", layer=0) != 0).any()

    def test_means_are_over_the_pairs_that_have_the_position(
        self, decoder: Decoder, make_task: MakeTask
    ) -> None:
        last_real = torch.tensor(self.LENGTHS) - 1
        task = make_task(decoder, 3, length=4, changed=1, answer_pos=last_real)
        result = patch(decoder, padded(task, self.LENGTHS, "left"), "resid_pre")
        last = result.effects.sel(pos=3)
        assert np.isfinite(last.values).sum(-1).tolist() == [1, 1]
        np.testing.assert_array_equal(result.mean.sel(pos=3), last.isel(example=2))
        gap = (result.clean - result.corrupted).isel(example=2)
        np.testing.assert_allclose(result.normalized.sel(pos=3), last.isel(example=2) / gap)
        assert result.details["prompts"][0]["padded"] == [0, 0, 1, 1]
        assert len(result.details["prompts"][0]["clean"]) == 2


class TestControls:
    def test_unrelated_values_come_from_another_pairs_source_run(
        self, model: Decoder, make_task: MakeTask
    ) -> None:
        task = make_task(model, 8)
        result = patch(model, task, "attn_out", layers=[1], positions=[6], seed=3, engine="hooks")
        other = partners(np.zeros(8, dtype=np.int64), seed=3)
        name = "blocks.1.hook_attn_out"
        with torch.no_grad():
            values = model.run_with_cache(task.clean)[1][name][other]

            def hook(tensor: Tensor, hook: object) -> Tensor:
                return torch.cat([tensor[:, :6], values[:, 6:7]], 1)

            logits = model.run_with_hooks(task.corrupted, fwd_hooks=[(name, hook)])[:, -1].double()
        rows = torch.arange(8)
        moved = (logits[rows, task.answer] - logits[rows, task.wrong]).numpy()
        expected = (moved - result.corrupted.values).mean()
        assert result.data["unrelated"].item() == pytest.approx(expected, abs=1e-12)

    def test_unrelated_pairs_are_of_equal_length(self, model: Decoder, make_task: MakeTask) -> None:
        """Alone in its length, a pair has no unrelated one; by role any other will do."""
        lengths = [2, 3, 4, 5, 6, 7]
        task = padded(make_task(model, 6, changed=1), lengths, "right")
        result = patch(model, task, "resid_post", positions="all", layers=[1])
        assert np.isnan(result.data["unrelated"]).all()
        assert claims(result, Evidence.CAUSAL) == []
        assert "no other pair of equal length" in result.claims[1].reason
        by_role = patch(model, task, "resid_post", positions="roles", layers=[1])
        assert np.isfinite(by_role.data["unrelated"]).all()

    def test_the_random_site_control_leaves_the_claimed_set_out(
        self, model: Decoder, make_task: MakeTask
    ) -> None:
        result = patch(model, make_task(model, 32), "z")
        outside = np.abs(result.mean.values[~result.data["causal"].values])
        assert 0 < outside.size < 8
        assert result.controls["random_site_95"] == np.quantile(outside, 0.95)
        assert result.controls["clean"] == result.clean.values.mean()

    def test_a_failed_self_patch_takes_every_label(
        self, model: Decoder, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A model that does not repeat itself: the control notices, no site is labelled."""
        task = make_task(model, 16)
        forward = type(model).forward
        calls = iter(range(10**6))

        def drifting(self: Decoder, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs) * (1 + 1e-3 * next(calls))

        monkeypatch.setattr(type(model), "forward", drifting)
        result = patch(model, task, "resid_post", positions=[-1], engine="hooks")
        assert result.claims[0].evidence is Evidence.FAILED
        assert claims(result, Evidence.CAUSAL) == []
        assert not result.data["causal"].any()
        assert "the self-patch control failed" in result.claims[1].reason
        assert any("self-patch" in words for words in result.details["warnings"])


class TestValues:
    @pytest.mark.parametrize("values", ["zero", "mean", "resample"])
    def test_ablated_values_do_not_come_from_the_pair(
        self, model: Decoder, make_task: MakeTask, values: str
    ) -> None:
        task = make_task(model, 8)
        result = patch(
            model, task, "z", direction="noise", values=values, layers=[1], heads=[2], seed=1
        )
        name = "blocks.1.attn.hook_z"
        with torch.no_grad():
            source = model.run_with_cache(task.corrupted)[1][name][:, :, 2]
            given = {
                "zero": torch.zeros_like(source),
                "mean": source.mean(0).expand_as(source),
                "resample": source[partners(np.zeros(8, dtype=np.int64), seed=1)],
            }[values]

            def hook(tensor: Tensor, hook: object) -> Tensor:
                out = tensor.clone()
                out[:, :, 2] = given
                return out

            logits = model.run_with_hooks(task.clean, fwd_hooks=[(name, hook)])[:, -1].double()
        rows = torch.arange(8)
        moved = (logits[rows, task.answer] - logits[rows, task.wrong]).numpy()
        # Means summed in another order: float32 rounding.
        np.testing.assert_allclose(
            result.effects.values.ravel(), moved - result.clean.values, atol=1e-5
        )

    def test_resampled_values_are_their_own_control(
        self, model: Decoder, make_task: MakeTask
    ) -> None:
        result = patch(model, make_task(model, 16), "resid_post", values="resample")
        np.testing.assert_array_equal(result.mean, result.data["unrelated"])
        assert claims(result, Evidence.CAUSAL) == []


class TestLabels:
    def test_a_site_that_does_everything_is_causal(
        self, model: Decoder, make_task: MakeTask
    ) -> None:
        result = patch(model, make_task(model, 16), "resid_post", positions=[5, -1], layers=[1])
        assert claims(result, Evidence.CAUSAL) == ["resid_post.L1@-1"]
        claim = next(c for c in result.claims if c.evidence is Evidence.CAUSAL)
        assert claim.statement == "resid_post of L1@-1 restores the answer"
        assert (claim.value, claim.unit, claim.n) == (pytest.approx(1.0), "of the gap", 16)
        assert "sign-flip, maximum over 1 site)" in claim.reason
        assert result.summary() == (
            "One site restores the answer: L1@-1 (+1.00 [1.00, 1.00] of the gap) (n = 16)"
        )

    def test_noise_says_needed(self, model: Decoder, make_task: MakeTask) -> None:
        result = patch(
            model, make_task(model, 16), "resid_post", direction="noise", positions=[-1], layers=[1]
        )
        assert result.claims[1].statement == "resid_post of L1@-1 is needed for the answer"

    @pytest.mark.parametrize("n", [1, 5])
    def test_few_pairs_carry_no_label(self, model: Decoder, make_task: MakeTask, n: int) -> None:
        result = patch(model, make_task(model, n), "resid_post", positions=[-1])
        assert claims(result, Evidence.CAUSAL) == []
        assert np.isnan(result.p_value).all()
        assert f"n = {n}, and at least 6 pairs are needed" in result.claims[1].reason
        words = "one pair is a demonstration" if n == 1 else "5 pairs: effects and their ranges"
        assert any(words in warning for warning in result.details["warnings"])

    def test_a_gap_within_its_noise_is_not_divided_by(
        self, model: Decoder, make_task: MakeTask
    ) -> None:
        """Each pair is there in both orders: the mean gap is nothing, the effects are not."""
        task = make_task(model, 8)
        assert task.wrong is not None
        both = Task(
            torch.cat([task.clean, task.corrupted]),
            torch.cat([task.corrupted, task.clean]),
            task.answer.repeat(2),
            task.wrong.repeat(2),
        )
        result = patch(model, both, "resid_post")
        assert np.isnan(result.normalized).all()
        assert "is within its own noise" in result.details["normalized_refused"]
        assert np.isfinite(result.mean).all()
        assert result.claims[1].unit == "nats"
        assert "nats" in result.summary()

    def test_the_null_of_swapped_pairs_is_labelled_one_time_in_twenty(
        self, model: Decoder, make_task: MakeTask
    ) -> None:
        """Swapping a pair, answers kept, turns its denoising effect into its noising one."""
        task = make_task(model, 32)
        denoise, noise = (
            patch(model, task, "z", direction=direction).effects.values
            for direction in ("denoise", "noise")
        )
        rng = np.random.default_rng(0)
        smallest = []
        for seed in range(200):
            swapped = rng.integers(0, 2, size=32).astype(bool)
            flipped = sign_flips(np.where(swapped, noise, denoise), n_flips=199, seed=seed)
            smallest.append(np.nanmin(flipped.p_value))
        # 5% plus three standard errors of a proportion over 200 reports.
        assert np.mean(np.array(smallest) <= 0.05) <= 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5

    def test_an_all_zero_grid_warns(self, model: Decoder, make_task: MakeTask) -> None:
        """FR-41."""
        task = make_task(model, 6, answer_pos=4)
        words = "patch of z, denoise: every effect is exactly zero; no one of these values moves"
        with pytest.warns(UserWarning, match=words):
            result = patch(model, task, "z", positions=[6])
        assert result.details["family"] == 0
        assert "; every effect is zero (n = 6)" in result.summary()
        assert not np.signbit(result.normalized).any()
        assert any("exactly zero" in words for words in result.details["warnings"])
        assert len(result.claims) == 1


class TestResult:
    def test_it_carries_what_the_reader_needs(self, model: Decoder, make_task: MakeTask) -> None:
        result = patch(model, make_task(model, 16), "z", seed=5, n_flips=99)
        details = result.details
        assert {key: details[key] for key in ("site", "positions", "direction", "values")} == {
            "site": "z",
            "positions": "all",
            "direction": "denoise",
            "values": "pair",
        }
        assert (details["engine"], details["family"], details["flips"]) == ("suffix", 8, 99)
        assert details["metric"]["formula"] == "logit(answer) - logit(wrong)"
        assert details["second_metric"]["name"] == "log_prob"
        assert details["gap"]["mean"] == pytest.approx(
            float((result.clean - result.corrupted).mean())
        )
        assert len(details["prompts"]) == 16
        assert result.provenance.seed == 5
        assert result.provenance.backend == "naive"
        assert len(result.to_frame()) == 8

    def test_saved_and_loaded(self, model: Decoder, make_task: MakeTask, tmp_path: Any) -> None:
        result = patch(model, make_task(model, 8), "resid_pre")
        loaded = load_result(result.save(tmp_path / "result.json"))
        assert isinstance(loaded, PatchingResult)
        assert loaded.summary() == result.summary()
        assert loaded.to_json() == result.to_json()

    def test_a_function_as_metric(self, model: Decoder, make_task: MakeTask) -> None:
        def margin(logits: Tensor, task: Task) -> Tensor:
            """The logit difference again."""
            rows = torch.arange(len(logits))
            assert task.wrong is not None
            return logits[rows, task.answer] - logits[rows, task.wrong]

        named = patch(model, make_task(model, 8), "z")
        given = patch(model, make_task(model, 8, metric=margin), "z")
        assert given.effects.values.tolist() == named.effects.values.tolist()
        assert given.details["metric"]["name"] == "margin"
        assert "the clean value of margin" in given.summary()

    @pytest.mark.parametrize("metric", ["kl", "loss", "log_prob"])
    def test_every_metric_runs_from_corrupted_to_clean(
        self, model: Decoder, make_task: MakeTask, metric: str
    ) -> None:
        result = patch(
            model, make_task(model, 8, metric=metric), "resid_pre", positions="all", layers=[0]
        )
        expected = np.where(result.details["normalized_refused"] is None, 1.0, np.nan)
        # float32, over a gap that is a part of unit scale.
        np.testing.assert_allclose(result.normalized, [expected], rtol=1e-4)

    def test_a_bar_only_on_a_terminal(
        self, model: Decoder, make_task: MakeTask, capsys: pytest.CaptureFixture[str]
    ) -> None:
        patch(model, make_task(model, 2), "z", n_flips=1)
        assert capsys.readouterr() == ("", "")


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (
                {"direction": "noising"},
                "direction must be one of 'denoise', 'noise', got 'noising'",
            ),
            ({"values": "zeros"}, "values must be one of .* got 'zeros'; nearest is 'zero'"),
            (
                {"engine": "hook"},
                "engine must be one of 'suffix', 'hooks', got 'hook'; nearest is 'hooks'",
            ),
            ({"site": "zz"}, "site must be one of"),
            ({"n_flips": 0}, "n_flips must be a whole number >= 1, got 0"),
        ],
    )
    def test_options(
        self, model: Decoder, make_task: MakeTask, arguments: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(TaskError, match=words):
            patch(model, make_task(model, 2), **{"site": "z", **arguments})

    def test_identical_prompts(self, model: Decoder) -> None:
        task = Task([[1, 2, 3], [4, 5, 6]], [[7, 2, 3], [4, 5, 6]], 1, 2)
        with pytest.raises(TaskError, match="corrupted is the clean prompt itself in pair 1"):
            patch(model, task, "z")

    def test_prompts_that_differ_in_padding_alone_are_identical(self, model: Decoder) -> None:
        task = Task(
            torch.tensor([[1, 2, 3]]), torch.tensor([[9, 2, 3]]), 1, 2, attention_mask=[[0, 1, 1]]
        )
        with pytest.raises(TaskError, match="corrupted is the clean prompt itself in pair 0"):
            patch(model, task, "z")

    def test_no_gap(self, model: Decoder) -> None:
        task = Task([[1, 2, 3]], [[1, 2, 4]], 1, 2, answer_pos=1)
        with pytest.raises(
            TaskError,
            match=r"clean and corrupted give the same logit_difference in every pair .*no gap",
        ):
            patch(model, task, "z")

    def test_tokens_that_do_not_fit_the_model(self, model: Decoder) -> None:
        with pytest.raises(TokenError, match=r"clean\[0, 1\] is 20, outside the vocabulary"):
            patch(model, Task([[1, 20]], [[2, 20]], 1, 2), "z")
        with pytest.raises(TokenError, match=r"corrupted\[0, 0\] is 21"):
            patch(model, Task([[1, 2]], [[21, 2]], 1, 2), "z")
        with pytest.raises(TokenError, match=r"wrong\[0, 0\] is 20"):
            patch(model, Task([[1, 2]], [[3, 2]], 1, 20), "z")
        with pytest.raises(ShapeError, match="tokens are 17 long, over n_ctx = 16"):
            patch(model, Task([[1] * 17], [[2] * 17], 1, 2), "z")

    def test_unknown_backend(self, model: Decoder, make_task: MakeTask) -> None:
        with pytest.raises(BackendError, match="backend must be one of"):
            patch(model, make_task(model, 2), "z", backend="fast")

    def test_nothing_stays_attached_after_an_error(
        self, model: Decoder, make_task: MakeTask
    ) -> None:
        def failing(logits: Tensor, task: Task) -> Tensor:
            raise HookError("stop here")

        with pytest.raises(HookError, match="stop here"):
            patch(model, make_task(model, 2, metric=failing), "z")
        assert model.hooks_active() == 0


def test_a_copy_in_float64_tightens_the_numbers(model: Decoder, make_task: MakeTask) -> None:
    """The sweep in float32 is the sweep in float64 to float32 rounding."""
    task = make_task(model, 6)
    double = copy.deepcopy(model).to(torch.float64)
    np.testing.assert_allclose(
        patch(double, task, "z").effects, patch(model, task, "z").effects, atol=2e-5
    )


@pytest.mark.parametrize("seed", [-1, 2**63, 0.5])
def test_a_seed_that_is_none(model: Decoder, make_task: MakeTask, seed: Any) -> None:
    with pytest.raises(TaskError, match=r"seed must be a whole number in \[0, 2\*\*63\), got "):
        patch(model, make_task(model, 2), "z", seed=seed)


def test_something_that_is_no_task(model: Decoder) -> None:
    with pytest.raises(TaskError, match="task must be a Task, got NoneType; build one with Task"):
        patch(model, None, "z")
