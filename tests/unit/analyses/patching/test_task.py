"""A task is checked on construction; each refusal names the argument."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headstream.analyses.patching.task import Task, pairs_as_values
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import HeadstreamError, ShapeError, TaskError, TokenError

CLEAN = torch.tensor([[0, 5, 6, 5], [0, 7, 8, 7]])
CORRUPTED = torch.tensor([[0, 9, 6, 5], [0, 9, 8, 7]])


def make(**changes: Any) -> Task:
    return Task(**{"clean": CLEAN, "corrupted": CORRUPTED, "answer": [6, 8], "wrong": 1, **changes})


class TestPairs:
    def test_tensors(self) -> None:
        task = make()
        assert torch.equal(task.clean, CLEAN)
        assert torch.equal(task.corrupted, CORRUPTED)
        assert task.answer.tolist() == [6, 8]
        assert task.wrong is not None
        assert task.wrong.tolist() == [1, 1]
        assert task.attention_mask is None
        assert task.answer_pos.tolist() == task.answer_columns.tolist() == [3, 3]
        assert len(task) == 2
        assert repr(task) == "<Task: 2 pairs of 4 tokens, logit_difference>"

    def test_lists_and_arrays_are_the_same_task(self) -> None:
        for form in (CLEAN.tolist(), list(CLEAN), CLEAN.numpy(), CLEAN.numpy().astype(np.int32)):
            assert torch.equal(make(clean=form).clean, CLEAN)

    def test_one_row_is_one_pair(self) -> None:
        task = Task(CLEAN[0], CORRUPTED[0], 6, 1)
        assert torch.equal(task.clean, CLEAN[:1])
        assert torch.equal(Task(CLEAN[0].tolist(), CORRUPTED[0].tolist(), 6, 1).clean, CLEAN[:1])
        assert repr(task) == "<Task: 1 pair of 4 tokens, logit_difference>"

    def test_ragged_lists_are_padded_on_the_right(self) -> None:
        task = Task([[1, 2], [3, 4, 5]], [[6, 2], [6, 4, 5]], 2, 1)
        assert task.clean.tolist() == [[1, 2, 0], [3, 4, 5]]
        assert task.attention_mask is not None
        assert task.attention_mask.tolist() == [[True, True, False], [True, True, True]]
        assert task.answer_pos.tolist() == [1, 2]
        assert task.columns.tolist() == [[0, 1, -1], [0, 1, 2]]
        assert repr(task) == "<Task: 2 pairs of 2 to 3 tokens, logit_difference>"

    def test_it_is_frozen_and_owns_its_numbers(self) -> None:
        answer = torch.tensor([6, 8])
        task = make(answer=answer)
        answer[0] = 3
        assert task.answer.tolist() == [6, 8]
        with pytest.raises(dataclasses.FrozenInstanceError):
            task.answer = answer  # type: ignore[misc]

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"corrupted": CORRUPTED[:1]}, TaskError, "clean has 2 prompts and corrupted 1"),
            (
                {"corrupted": CORRUPTED[:, :3]},
                TaskError,
                "corrupted has 3 tokens in pair 0, clean has 4; they must be equally long; "
                "replace tokens one for one",
            ),
            (
                {"clean": [[1, 2, 3, 4], [1, 2, 3]]},
                TaskError,
                "corrupted has 4 tokens in pair 1, clean has 3",
            ),
            ({"clean": CLEAN.float()}, ShapeError, r"clean must be int64 .* got float32 \[2, 4\]"),
            ({"clean": CLEAN.int()}, ShapeError, "clean must be int64 .* got int32"),
            ({"corrupted": CORRUPTED[None]}, ShapeError, r"corrupted must be .* got \[1, 2, 4\]"),
            ({"clean": "a b"}, ShapeError, "clean must be int64 tokens .* got str"),
            ({"clean": []}, TaskError, "clean is empty: at least one pair is needed"),
            ({"clean": CLEAN[:0]}, TaskError, "clean is empty"),
            ({"clean": [[1], []]}, TaskError, r"clean\[1\] is an empty prompt"),
            ({"clean": [[1, 2.5]]}, ShapeError, r"clean\[0\] must be a list of token ids"),
            ({"clean": [["a"]]}, ShapeError, r"clean\[0\] must be a list of token ids"),
            ({"clean": CLEAN - 1}, TokenError, "clean must hold token ids >= 0, got -1"),
            ({"clean": (CLEAN - 1).tolist()}, TokenError, r"clean\[0\] must hold token ids >= 0"),
            ({"clean": [[10**30]]}, TokenError, r"clean\[0\] must hold token ids below 2\*\*63"),
            ({"roles": [1]}, TaskError, "roles must map names to positions, got list; for example"),
            ({"answer": [6]}, ShapeError, r"answer must hold one number a pair, \[2\], got \[1\]"),
            ({"answer": []}, ShapeError, r"answer must hold one number a pair, \[2\], got none"),
            ({"answer": [6.0, 8.0]}, ShapeError, "answer must hold whole numbers, got float32"),
            ({"answer": "x"}, ShapeError, "answer must hold one number a pair, got 'x'"),
            ({"answer": [6, -8]}, TokenError, "answer must hold token ids >= 0, got -8"),
            ({"wrong": [1, 8]}, TaskError, "answer and wrong are both token 8 in pair 1"),
            (
                {"wrong": None},
                TaskError,
                "metric 'logit_difference' compares answer with wrong, and wrong is None; "
                "give wrong, or metric='log_prob'",
            ),
            ({"metric": "los"}, TaskError, "got 'los'; nearest is 'loss'"),
            ({"answer_pos": 4}, TaskError, "answer_pos is 4 in pair 0, which has 4 real tokens"),
            ({"answer_pos": [0, -5]}, TaskError, "answer_pos is -5 in pair 1"),
            ({"roles": {"q": [1, 9]}}, TaskError, r"roles\['q'\] is 9 in pair 1"),
            ({"roles": {"": 1}}, TaskError, "roles must be named by non-empty strings, got ''"),
            (
                {"attention_mask": torch.ones(2, 3, dtype=torch.int64)},
                ShapeError,
                r"attention_mask must be \[example, pos\] = \[2, 4\], got \[2, 3\]",
            ),
            (
                {"attention_mask": torch.full((2, 4), 2)},
                ShapeError,
                "attention_mask must hold 0 .* and 1 .* only",
            ),
            (
                {"attention_mask": [[1, 1, 1, 1], [0, 0, 0, 0]]},
                TaskError,
                "attention_mask leaves no real token in pair 1",
            ),
        ],
    )
    def test_refusals(
        self, changes: dict[str, Any], error: type[HeadstreamError], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            make(**changes)

    def test_a_mask_beside_ragged_lists_is_refused(self) -> None:
        with pytest.raises(TaskError, match="attention_mask was given, but clean holds rows of"):
            Task([[1, 2], [3]], [[4, 2], [4]], 2, 1, attention_mask=torch.ones(2, 2).long())


class TestPositions:
    """Positions count real tokens, whatever padding stands before them."""

    LEFT = [[0, 0, 1, 1], [1, 1, 1, 1]]
    RIGHT = [[1, 1, 0, 0], [1, 1, 1, 1]]

    def test_both_sides_name_the_same_tokens(self) -> None:
        left = make(attention_mask=self.LEFT, roles={"first": 0, "last": -1})
        right = make(attention_mask=self.RIGHT, roles={"first": 0, "last": -1})
        for task in (left, right):
            assert task.lengths.tolist() == [2, 4]
            assert task.answer_pos.tolist() == task.roles["last"].tolist() == [1, 3]
            assert task.roles["first"].tolist() == [0, 0]
        assert left.columns.tolist() == [[2, 3, -1, -1], [0, 1, 2, 3]]
        assert right.columns.tolist() == [[0, 1, -1, -1], [0, 1, 2, 3]]
        assert left.answer_columns.tolist() == [3, 3]
        assert right.answer_columns.tolist() == [1, 3]

    def test_a_hole_takes_no_position(self) -> None:
        task = make(attention_mask=[[1, 0, 1, 1], [1, 1, 1, 1]])
        assert task.columns[0].tolist() == [0, 2, 3, -1]

    def test_a_full_mask_is_no_mask(self) -> None:
        assert make(attention_mask=torch.ones(2, 4, dtype=torch.bool)).attention_mask is None

    def test_positions_past_a_short_row_are_refused(self) -> None:
        with pytest.raises(TaskError, match="answer_pos is 2 in pair 0, which has 2 real tokens"):
            make(attention_mask=self.LEFT, answer_pos=2)


def toy() -> Decoder:
    config = DecoderConfig(
        n_layers=1, n_heads=1, d_model=4, d_head=4, d_vocab=5, n_ctx=8, bos_token_id=0
    )
    model = Decoder(config)
    model.vocab = ["<bos>", "a", "b", "c", "d"]
    return model


class TestValues:
    def test_real_tokens_with_their_words(self) -> None:
        task = Task(
            torch.tensor([[0, 1, 2]]),
            torch.tensor([[0, 3, 2]]),
            1,
            3,
            attention_mask=[[0, 1, 1]],
            roles={"changed": 0},
        )
        assert pairs_as_values(task, toy()) == [
            {
                "clean": [1, 2],
                "corrupted": [3, 2],
                "clean_tokens": ["a", "b"],
                "corrupted_tokens": ["c", "b"],
                "answer": 1,
                "wrong": 3,
                "answer_token": "a",
                "wrong_token": "c",
                "answer_pos": 1,
                "roles": {"changed": 0},
                "mask": None,
                "padded": [0, 1, 1],
            }
        ]

    def test_without_a_vocabulary_words_are_ids(self) -> None:
        model = Decoder(toy().config)
        value = pairs_as_values(Task([[0, 1]], [[0, 2]], 1, metric="prob"), model)[0]
        assert value["clean_tokens"] == ["0", "1"]
        assert (value["wrong"], value["wrong_token"], value["padded"]) == (None, None, None)


class TestJsonLines:
    def write(self, tmp_path: Path, *lines: Any) -> Path:
        path = tmp_path / "pairs.jsonl"
        path.write_text(
            "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        )
        return path

    def test_strings_and_ids(self, tmp_path: Path) -> None:
        path = self.write(
            tmp_path,
            {"clean": "a b", "corrupted": "c b", "answer": "a", "wrong": "c"},
            "",
            {"clean": [0, 1, 4, 2], "corrupted": [0, 3, 4, 2], "answer": 1, "wrong": [3]},
        )
        task = Task.from_jsonl(path, toy(), metric="prob")
        assert task.clean.tolist() == [[0, 1, 2, 0], [0, 1, 4, 2]]
        assert task.answer_pos.tolist() == [2, 3]
        assert task.answer.tolist() == [1, 1]
        assert task.wrong is not None
        assert task.wrong.tolist() == [3, 3]
        assert task.metric.name == "prob"

    GOOD = {"clean": "a b", "corrupted": "c b", "answer": "a", "wrong": "c"}

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("{", "line 2: not JSON"),
            ("[1]", "line 2: expected an object, got list"),
            ("[" * 100_000, "line 2: nested too deeply"),
            ('{"answer": ' + "9" * 5000 + "}", "line 2: not JSON: Exceeds the limit"),
            ({**GOOD, "answer": 10**30}, r"line 2: answer must hold token ids below 2\*\*63"),
            ({**GOOD, "wrong": -1}, "line 2: wrong must hold token ids >= 0, got -1"),
            ({**GOOD, "clean": [0, 10**30]}, r"line 2: clean\[0\] must hold token ids below 2"),
            ({**GOOD, "wrongs": 1}, "line 2: unknown key 'wrongs'; .*nearest is 'wrong'"),
            ({"clean": "a b"}, "line 2: lacks 'corrupted', 'answer'"),
            ({**GOOD, "clean": "a zz"}, "line 2: word 1 of the prompt, 'zz', is not in the voc"),
            ({**GOOD, "answer": "a b"}, "line 2: 'a b' is 2 tokens, expected one"),
            ({**GOOD, "answer": None}, "line 2: 'answer' must be one token, got None"),
            ({**GOOD, "corrupted": "b"}, "line 2: corrupted has 2 tokens, clean has 3"),
            (
                {**GOOD, "clean": 3},
                "line 2: 'clean' must be a string or a list of token ids, got 3",
            ),
            ({**GOOD, "clean": [0, 99]}, "line 2: corrupted has 3 tokens, clean has 2"),
            ({**GOOD, "answer": 99}, "line 2: 'answer' holds token id 99, and the model's ids"),
            (
                {**GOOD, "clean": [0, 99, 2]},
                "line 2: 'clean' holds token id 99, and the model's ids are 0 to",
            ),
            ({**GOOD, "wrong": "a"}, "line 2: answer and wrong are both 'a'; wrong must be an"),
            ({**GOOD, "corrupted": "a b"}, "line 2: corrupted is the clean prompt itself"),
            ({**GOOD, "clean": ["a"]}, r"line 2: clean\[0\] must be a list of token ids"),
        ],
    )
    def test_refusals_name_the_line(self, tmp_path: Path, line: Any, words: str) -> None:
        with pytest.raises(TaskError, match=words):
            Task.from_jsonl(self.write(tmp_path, self.GOOD, line), toy())

    def test_a_byte_order_mark_and_a_line_separator_in_a_string(self, tmp_path: Path) -> None:
        path = tmp_path / "pairs.jsonl"
        line = json.dumps(self.GOOD | {"clean": "a\u2028b"}, ensure_ascii=False)
        path.write_bytes(("\ufeff" + line + "\r\n" + json.dumps(self.GOOD)).encode())
        # U+2028 is white space within the prompt, and the line goes on behind it.
        task = Task.from_jsonl(path, toy())
        assert task.clean.tolist()[0] == task.clean.tolist()[1]
        assert len(task) == 2

    def test_refusals_of_the_file(self, tmp_path: Path) -> None:
        with pytest.raises(TaskError, match="cannot read pairs from"):
            Task.from_jsonl(tmp_path / "none.jsonl", toy())
        with pytest.raises(TaskError, match="holds no pairs"):
            Task.from_jsonl(self.write(tmp_path, ""), toy())
        partly = self.write(
            tmp_path, self.GOOD, {k: v for k, v in self.GOOD.items() if k != "wrong"}
        )
        with pytest.raises(TaskError, match="gives 'wrong' in 1 of 2 lines"):
            Task.from_jsonl(partly, toy())


def test_a_model_without_a_card_has_no_task() -> None:
    with pytest.raises(TaskError, match="model 'unnamed' has no card"):
        Task.for_model(toy())


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "0", True])
def test_a_seed_that_is_none(seed: Any) -> None:
    with pytest.raises(TaskError, match=r"seed must be a whole number in \[0, 2\*\*63\), got "):
        Task.for_model(toy(), seed=seed)
