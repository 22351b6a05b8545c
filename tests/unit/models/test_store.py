"""A model on disk: the same bits back, whole or not at all, and no damage that goes unnoticed."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from headstream.models import store
from headstream.models.decoder import Decoder, build
from headstream.models.errors import ConfigError, StoreError
from headstream.models.store import load

FILES = ["card.json", "config.json", "vocab.json", "weights.safetensors"]


@pytest.fixture
def saved(model_a: Decoder, tmp_path: Path) -> Path:
    model_a.vocab = [f"w{i}" for i in range(20)]
    model_a.card = {"task": "none", "loss": 0.25}
    return Path(model_a.save(tmp_path / "toy"))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the weights on disk, and drop the card, whose hash would object first."""
    file = folder / "weights.safetensors"
    weights = safetensors.torch.load(file.read_bytes())
    change(weights)
    safetensors.torch.save_file(weights, file)
    (folder / "card.json").unlink()


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_bias": True, "d_mlp": 8, "mlp_bias": True, "unembed_bias": True},
        {"positions": "rotary", "norm": "rmsnorm", "n_kv_heads": 2, "d_mlp": 8, "gated_mlp": True},
        {"positions": "shortformer", "tied_embeddings": True, "attn_scale": 0.7},
        {"positions": "sinusoidal", "norm": "none", "bos_token_id": 0, "n_train": 5},
    ],
    ids=lambda fields: fields.get("positions", "learned"),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_round_trip_is_bitwise(
    build: Callable[..., Decoder],
    tmp_path: Path,
    tokens: Tensor,
    fields: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    model = build(fields, dtype=dtype)
    folder = model.save(tmp_path / "toy")
    again = load(folder)
    assert again.config == model.config
    assert again.dtype == dtype
    assert again.name == "toy"
    assert again.weights_sha256() == model.weights_sha256()
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    for backend in ("naive", "flash"):
        assert torch.equal(again(tokens, backend=backend), model(tokens, backend=backend))


def test_what_lies_in_the_folder(saved: Path, model_a: Decoder) -> None:
    assert sorted(os.listdir(saved)) == FILES
    weights = safetensors.torch.load((saved / "weights.safetensors").read_bytes())
    # Nothing that follows from the configuration: no mask, no rotary table (FR-76).
    assert set(weights) == set(model_a.state_dict())
    assert all(name.rsplit(".", 1)[-1][0] in "Wbw" for name in weights)
    card = json.loads((saved / "card.json").read_text())
    assert card == {
        "name": "toy",
        "task": "none",
        "loss": 0.25,
        "weights_sha256": model_a.weights_sha256(),
    }
    again = load(str(saved))
    assert again.vocab == model_a.vocab
    assert again.card == card
    mode = (saved.parent / "other").mkdir() or (saved.parent / "other").stat().st_mode
    assert saved.stat().st_mode == mode


def test_dtype_and_name(saved: Path, tokens: Tensor, tmp_path: Path, model_a: Decoder) -> None:
    single = load(saved, dtype=torch.float32)
    assert single.dtype == torch.float32
    assert (single(tokens) - model_a(tokens)).abs().max() < 1e-4
    single.name = "mine"
    single.save(tmp_path / "folder")
    assert load(tmp_path / "folder").name == "mine"
    with pytest.raises(ConfigError, match=r"dtype must be torch\.float16, bfloat16"):
        load(saved, dtype=torch.int64)


def test_weights_that_share_storage(model_l1: Decoder, tmp_path: Path) -> None:
    """A user may tie what is not tied here; each is written for itself."""
    model_l1.blocks[0].attn.W_K = model_l1.blocks[0].attn.W_Q
    again = load(model_l1.save(tmp_path / "tied"))
    assert torch.equal(again.W_K, model_l1.W_Q)


@pytest.mark.parametrize("name", ["weights.safetensors", "config.json"])
def test_a_missing_file(saved: Path, name: str) -> None:
    (saved / name).unlink()
    words = rf"'.*{name}' is missing; a model folder is written by save"
    with pytest.raises(StoreError, match=words):
        load(saved)


def test_card_and_vocabulary_may_be_missing(saved: Path, model_a: Decoder) -> None:
    (saved / "card.json").unlink()
    (saved / "vocab.json").unlink()
    again = load(saved)
    assert (again.card, again.vocab, again.name) == (None, None, "toy")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("weights.safetensors", b"", r"weights.safetensors' is damaged"),
        ("weights.safetensors", b"\x80\x04N.", r"weights.safetensors' is damaged"),
        ("weights.safetensors", b"\xff" * 200, r"weights.safetensors' is damaged"),
        ("config.json", b"{", r"holds no usable model: configuration is not JSON"),
        ("config.json", b'{"n_layers": 2}', r"no usable model: configuration lacks n_heads"),
        ("config.json", b"\xff\xfe", r"config.json' cannot be read"),
        ("card.json", b"{", r"card.json' is not JSON"),
        ("card.json", b"[]", r"card.json' must hold a JSON dict, got list"),
        ("vocab.json", b'{"a": 1}', r"vocab.json' must hold a JSON list, got dict"),
        ("vocab.json", b'["a"]', r"vocabulary has 1 strings, expected d_vocab = 20"),
        ("vocab.json", b"[1]", r"vocabulary has 1 strings"),
    ],
)
def test_a_damaged_file(saved: Path, name: str, content: bytes, words: str) -> None:
    (saved / name).write_bytes(content)
    with pytest.raises(StoreError, match=words):
        load(saved)


def test_a_file_cut_short_or_with_one_bit_turned(saved: Path) -> None:
    file = saved / "weights.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    with pytest.raises(StoreError, match=r"weights.safetensors' is damaged"):
        load(saved)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    words = r"are not the ones its card describes: SHA-256 .{12}\.\.\., expected .{12}\.\.\."
    with pytest.raises(StoreError, match=words):
        load(saved)
    file.write_bytes(whole)
    load(saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("blocks.1.attn.b_Q"), r"missing \['blocks.1.attn.b_Q'\]$"),
        (lambda w: w.update(mask=torch.ones(2, dtype=torch.float64)), r"unknown \['mask'\]$"),
        (
            lambda w: w.update({"blocks.0.ln1.weight": w.pop("blocks.0.ln1.w")}),
            r"missing \['blocks.0.ln1.w'\]; unknown \['blocks.0.ln1.weight'\]$",
        ),
        (
            lambda w: w.update({"embed.W_E": w["embed.W_E"].T.contiguous()}),
            r"weight 'embed.W_E' has shape \[16, 20\], expected \[20, 16\]",
        ),
        (
            lambda w: w.update({"ln_final.w": w["ln_final.w"].float()}),
            r"weights mix dtypes \['torch.float32', 'torch.float64'\]; one is expected",
        ),
        (
            lambda w: w.update({name: value.long() for name, value in w.items()}),
            r"dtype must be torch.float16, bfloat16, float32 or float64, got torch.int64",
        ),
        (
            lambda w: w.clear(),
            r"do not fit the configuration: missing \['blocks.0.attn.W_K'",
        ),
    ],
    ids=["missing", "extra", "renamed", "shape", "dtypes", "integers", "empty"],
)
def test_weights_that_do_not_fit(
    saved: Path, change: Callable[[dict[str, Tensor]], Any], words: str
) -> None:
    rewrite(saved, change)
    with pytest.raises(StoreError, match=rf"'.*toy' holds no usable model: .*{words}"):
        load(saved)
    weights = safetensors.torch.load((saved / "weights.safetensors").read_bytes())
    config = load_config(saved)
    with pytest.raises(ConfigError, match=words):
        build(config, weights)


def load_config(folder: Path) -> Any:
    return store.DecoderConfig.from_json((folder / "config.json").read_text())


def test_a_configuration_of_another_model(saved: Path) -> None:
    fields = json.loads((saved / "config.json").read_text())
    for change, words in (
        (
            {"n_heads": 2},
            r"'blocks.0.attn.W_K' has shape \[4, 16, 4\], expected \[2, 16, 4\]",
        ),
        ({"positions": "rotary"}, r"unknown \['pos_embed.W_pos'\]"),
        ({"rotary_dim": 2}, r"rotary_dim: partial rotary positions is not supported yet"),
    ):
        (saved / "config.json").write_text(json.dumps(fields | change))
        with pytest.raises(StoreError, match=words):
            load(saved)


def test_a_name_that_is_no_model(tmp_path: Path) -> None:
    for name in ("no-such-model", str(tmp_path / "nowhere")):
        with pytest.raises(StoreError, match=rf"no model '{name}': it is neither a folder nor one"):
            load(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match=r"config.json' is missing; a model folder is written by"):
        load(tmp_path / "empty")


# Whole or not at all.


def broken(*arguments: Any, **options: Any) -> None:
    raise OSError("No space left on device")


STEPS = {
    "weights": (safetensors.torch, "save"),
    "bytes": (Path, "write_bytes"),
    "card": (json, "dumps"),
    "hash": (Decoder, "weights_sha256"),
    "text": (Path, "write_text"),
    "folder": (Path, "mkdir"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_half_written(
    model_a: Decoder,
    model_r: Decoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    overwrite: bool,
) -> None:
    """Whatever step fails: no folder, or (overwriting) the old model untouched."""
    target = tmp_path / "toy"
    if overwrite:
        model_r.save(target)
    with monkeypatch.context() as patch:
        patch.setattr(*STEPS[step], broken)
        with pytest.raises(StoreError, match=r"cannot save to '.*toy': No space left on device"):
            model_a.save(target, overwrite=overwrite)
    assert os.listdir(tmp_path) == (["toy"] if overwrite else [])
    if overwrite:
        assert load(target).weights_sha256() == model_r.weights_sha256()


@pytest.mark.parametrize("failing", [1, 2])
def test_a_move_into_place_that_fails(
    model_a: Decoder,
    model_r: Decoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
) -> None:
    """Either of the two moves of an overwrite: the old model is back in its place."""
    target = tmp_path / "toy"
    model_r.save(target)
    rename, moves = Path.rename, []

    def fragile(path: Path, other: Path) -> Path:
        moves.append(path)
        if len(moves) == failing:
            raise KeyboardInterrupt
        return rename(path, other)

    monkeypatch.setattr(Path, "rename", fragile)
    with pytest.raises(KeyboardInterrupt):
        model_a.save(target, overwrite=True)
    assert os.listdir(tmp_path) == ["toy"]
    assert load(target).weights_sha256() == model_r.weights_sha256()


def test_overwriting(model_a: Decoder, model_r: Decoder, tmp_path: Path) -> None:
    target = tmp_path / "toy"
    model_a.save(target)
    with pytest.raises(StoreError, match=r"cannot save to '.*toy': it exists; choose another"):
        model_r.save(target)
    assert load(target).weights_sha256() == model_a.weights_sha256()
    model_r.save(target, overwrite=True)
    assert load(target).weights_sha256() == model_r.weights_sha256()
    assert os.listdir(tmp_path) == ["toy"]


def test_what_is_never_deleted(model_a: Decoder, tmp_path: Path) -> None:
    """A folder that is no model, or that holds more than one, is not ours to replace."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "thesis.tex").write_text("years")
    with pytest.raises(StoreError, match=r"cannot save to '.*work': it exists"):
        model_a.save(work, overwrite=True)
    (work / "config.json").write_text("{}")
    words = r"cannot replace '.*work': beside a model it holds thesis.tex; choose another folder"
    with pytest.raises(StoreError, match=words):
        model_a.save(work, overwrite=True)
    assert (work / "thesis.tex").read_text() == "years"
    words = r"cannot save to '.*model': folder '.*nowhere' does not exist; create it first"
    with pytest.raises(StoreError, match=words):
        model_a.save(tmp_path / "nowhere" / "model")
    assert os.listdir(tmp_path) == ["work"]


def test_a_link_to_a_model(model_a: Decoder, model_r: Decoder, tmp_path: Path) -> None:
    model_a.save(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    model_r.save(tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert load(tmp_path / "real").weights_sha256() == model_r.weights_sha256()
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


def test_a_card_that_is_not_json(model_a: Decoder, tmp_path: Path) -> None:
    model_a.card = {"loss": torch.tensor(1.0)}
    with pytest.raises(StoreError, match=r"model\.card cannot be written as JSON: Object"):
        model_a.save(tmp_path / "toy")
    assert os.listdir(tmp_path) == []


def test_hash_sees_the_last_bit(model_l1: Decoder, build: Callable[..., Decoder]) -> None:
    before = model_l1.weights_sha256()
    assert len(before) == 64
    weight = model_l1.embed.W_E.data
    weight[3, 2] = torch.nextafter(weight[3, 2], torch.tensor(9.0, dtype=torch.float64))
    assert model_l1.weights_sha256() != before
    # Equal numbers (zeros) of another shape, dtype or name are other weights.
    hashes = set()
    for fields in ({}, {"d_head": 2, "n_heads": 8}, {"norm": "none"}, {"positions": "none"}):
        model = build(fields)
        for parameter in model.parameters():
            parameter.data.zero_()
        hashes |= {model.weights_sha256(), model.float().weights_sha256()}
    assert len(hashes) == 8


def test_loading_needs_no_pickle(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(f"pickle.{name}", broken)
    load(saved)


def test_every_file_has_the_permissions_of_the_umask(saved: Path) -> None:
    modes = {(saved / name).stat().st_mode for name in FILES}
    plain = saved.parent / "plain"
    plain.write_text("")
    assert modes == {plain.stat().st_mode}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(saved: Path, value: float) -> None:
    def spoil(weights: dict[str, Tensor]) -> None:
        weights["blocks.1.attn.W_V"][0, 0, 0] = value

    rewrite(saved, spoil)
    words = r"not finite: blocks.1.attn.W_V holds NaN or infinity in 1 of \d+ entries; train or"
    with pytest.raises(StoreError, match=words):
        load(saved)


def test_weights_too_large_for_the_dtype_asked_for(saved: Path) -> None:
    def grow(weights: dict[str, Tensor]) -> None:
        weights["embed.W_E"][0, 0] = 1e6  # float16 ends at 65504

    rewrite(saved, grow)
    assert load(saved, dtype=torch.float32).dtype == torch.float32
    with pytest.raises(StoreError, match=r"not finite as float16: embed.W_E .* wider dtype"):
        load(saved, dtype=torch.float16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layers": 10**9}, r"missing \['blocks.2.attn.W_K', .*\] and \d{10,} more$"),
        ({"d_model": 10**7}, r"has shape \[4, 16, 4\], expected \[4, 10000000, 4\]"),
        ({"d_vocab": 10**12}, r"'embed.W_E' has shape \[20, 16\], expected \[1000000000000, 16\]"),
    ],
)
def test_a_configuration_too_large_to_build(
    saved: Path, change: dict[str, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a decoder was built")

    monkeypatch.setattr("headstream.models.decoder.Decoder", refuse)
    fields = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(fields | change))
    with pytest.raises(StoreError, match=words):
        load(saved)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", [None, "", 5])
def test_load_wants_a_name(name: Any) -> None:
    with pytest.raises(StoreError, match=rf"name of a model or a folder, got {name!r}$"):
        load(name)


@pytest.mark.parametrize("device", ["foo", "cuda:99"])
def test_a_device_that_is_not_there(saved: Path, device: str) -> None:
    with pytest.raises(StoreError, match=rf"device '{device}' cannot be used: .+ always can$"):
        load(saved, device=device)
