"""Exported graphs equal eager mode: torch.export's and onnxruntime's, parameters randomised, over batch sizes and lengths.

Largest absolute difference allowed 1e-4 (found: below 1e-5; `pytest -s` prints it).
"""

from __future__ import annotations

import builtins
import json

import onnxruntime
import pytest
import torch
from tokenizers import Tokenizer as Rust

import worldtokens as wt
from worldtokens.testing import randomised
from worldtokens.tokenizers.base import Batch

TEXTS = ["a cat", "the quick brown fox jumps over the lazy dog", "", "two cats on a mat"] * 20


def text_tokenizer(**settings) -> wt.TextTokenizer:
    return wt.TextTokenizer.train(TEXTS, 300, dim=32, context=24, start="<s>", **settings)


def clip(loss: str = "clip", **options) -> wt.CLIP:
    fronts = {
        "image": wt.ImageTokenizer(32, patch=8, size=(32, 24), class_token=True, registers=2),
        "text": text_tokenizer(),
    }
    trunk = wt.Transformer(32, 2, 4, activation="quick_gelu")
    return randomised(wt.CLIP(fronts, trunk, dim=16, loss=loss, **options))


def run(session: onnxruntime.InferenceSession, **inputs: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(session.run(None, {k: v.numpy() for k, v in inputs.items()})[0])


def exported(model, tmp_path, column=None):
    program = wt.export_program(model, column).module()
    path = wt.export_onnx(model, tmp_path / "x.onnx", column)
    return program, onnxruntime.InferenceSession(str(path)), json.loads(path.with_suffix(".json").read_text())


def check(name: str, want: torch.Tensor, *found: torch.Tensor) -> float:
    far = max(float((want - f).abs().max()) for f in found)
    assert all(f.shape == want.shape for f in found)
    assert far < 1e-4, f"{name}: {far}"
    return far


@torch.no_grad()
def test_clip_towers(tmp_path):
    model, g = clip(), torch.Generator().manual_seed(1)
    program, session, facts = exported(model, tmp_path, "image")
    for rows in (1, 2, 7):
        pixels = torch.randn(rows, 3, 32, 24, generator=g)
        want = model.encode("image", pixels)
        check(f"{rows} images", want, program(pixels), run(session, pixels=pixels))
    assert facts["inputs"]["pixels"] == {"type": "float32", "shape": ["rows", 3, 32, 24]}
    assert facts["preprocess"]["mean"] == list(model.tokenizers["image"].mean)
    assert facts["output"] == {"name": "embeddings"}

    program, session, facts = exported(model, tmp_path, "text")
    front, worst = model.tokenizers["text"], 0.0
    for rows, longest in ((1, 1), (1, 24), (2, 1), (3, 2), (5, 24), (4, 13)):
        ids = torch.randint(0, front.vocab_size, (rows, longest), generator=g)
        lengths = torch.randint(1, longest + 1, (rows,), generator=g)
        want = model.encode("text", Batch(ids=ids, lengths=tuple(lengths.tolist())))
        found = program(ids, lengths), run(session, ids=ids, lengths=lengths)
        worst = max(worst, check(f"{rows} texts of up to {longest}", want, *found))
        # ids after a text's end change nothing
        padding = torch.arange(longest) >= lengths[:, None]
        other = ids.masked_fill(padding, 3)
        check("padding", want, program(other, lengths), run(session, ids=other, lengths=lengths))
    print(f"text tower: {worst:.1e}")
    # the files beside the graph are enough to encode a text without this package
    settings = facts["preprocess"]
    rust = Rust.from_file(str(tmp_path / settings["vocabulary"]))
    for text in ("the quick cat", "jumps"):
        ids = [
            settings["start"]["id"],
            *rust.encode(text, add_special_tokens=False).ids,
            settings["end"]["id"],
        ]
        found = run(session, ids=torch.tensor([ids]), lengths=torch.tensor([len(ids)]))
        check(text, model.embed("text", [text]), found)


@torch.no_grad()
def test_standardisation_is_part_of_the_graph(tmp_path):
    model = clip(standardize=True)
    for standard in model.standardizers.values():
        standard.mean.normal_()
        standard.var.uniform_(0.1, 3)
    program, session, _ = exported(model, tmp_path, "image")
    pixels = torch.randn(3, 3, 32, 24)
    want = model.encode("image", pixels)
    check("standardised", want, program(pixels), run(session, pixels=pixels))
    assert (want - clip().encode("image", pixels)).abs().max() > 0.1


@torch.no_grad()
def test_native_aspect_has_dynamic_image_sizes(tmp_path):
    front = wt.ImageTokenizer(32, patch=8, size=None, max_tokens=64, class_token=True)
    model = randomised(wt.Classifier(front, wt.Transformer(32, 2, 4), ["a", "b", "c"], pool="mean"))
    program, session, facts = exported(model, tmp_path)
    for rows, height, width in ((1, 16, 16), (3, 64, 64), (2, 24, 136), (1, 512, 16)):
        pixels = torch.randn(rows, 3, height, width)
        want = model({"image": pixels})
        check(f"{height} x {width}", want, program(pixels), run(session, pixels=pixels))
    assert facts["output"] == {"name": "logits", "classes": ["a", "b", "c"]}
    assert facts["preprocess"]["size"] is None and facts["preprocess"]["max_patches"] == 64


MODELS = {
    "attention pooling after a class token, RoPE, registers, LayerScale": lambda: wt.Classifier(
        wt.ImageTokenizer(
            32, patch=8, size=32, positions="none", class_token=True, registers=1, embedding={"span": 7}
        ),
        wt.Transformer(32, 2, 4, rope=2, qk_norm=True, config={"layer_scale": 0.1}),
        5,
        pool=wt.AttentionPool(32, 4, skip=2),
        pool_norm=True,
    ),
    "mean of patches, sin-cos": lambda: wt.Classifier(
        wt.ImageTokenizer(32, patch=8, size=32, positions="sincos", registers=2),
        wt.Transformer(32, 2, 4),
        5,
        pool="patches",
    ),
    "bidirectional text, post-norm, no head": lambda: wt.Classifier(
        text_tokenizer(causal=False),
        wt.Transformer(32, 2, 4, config={"pre_norm": False, "first_norm": True}),
        0,
    ),
    "text, GQA, RMSNorm, SwiGLU, RoPE": lambda: wt.Classifier(
        text_tokenizer(positions="none"),
        wt.Transformer(32, 2, 4, kv_heads=2, norm="rms", activation="swiglu", rope=1, config={"bias": False}),
        5,
    ),
    "text pairs, BERT's pooler": lambda: wt.Encoder(
        wt.PairTokenizer(text_tokenizer().backend, 32, context=24, start="<s>", end="<|endoftext|>"),
        wt.Transformer(32, 2, 4, config={"pre_norm": False, "first_norm": True}),
        pool="first",
        dim=32,
        activation="tanh",
    ),
    "text, window, attention pooling": lambda: wt.Classifier(
        text_tokenizer(), wt.Transformer(32, 2, 4, window=3.0), 5, pool=wt.AttentionPool(32, 4)
    ),
}


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [next(iter(MODELS)), *(pytest.param(n, marks=pytest.mark.slow) for n in [*MODELS][1:])]
)
def test_architectures_that_can_be_exported(name):
    """By torch.export alone: writing ONNX takes seconds per model."""
    model = randomised(MODELS[name]())
    program = wt.export_program(model).module()
    encoder = isinstance(model, wt.Encoder)
    for rows, n in ((1, 1), (3, 9), (2, 24)):
        if not encoder and model.column == "image":
            batch = torch.randn(rows, 3, 32, 32)
            found = program(batch)
        else:
            lengths = torch.arange(n, n - rows, -1).clamp(min=1)
            batch = Batch(ids=torch.randint(0, 280, (rows, n)), lengths=tuple(lengths.tolist()))
            found = program(batch["ids"], lengths)
        check(name, model.features(batch) if encoder else model({model.column: batch}), found)


@torch.no_grad()
@pytest.mark.slow
def test_text_padded_to_the_context(tmp_path):
    front = wt.TextTokenizer(
        text_tokenizer().backend, 32, context=8, causal=False, end="<|endoftext|>", pad_to_context=True
    )
    model = randomised(wt.Encoder(front, wt.Transformer(32, 1, 4), dim=12, normalize=True, pool="last"))
    program, session, facts = exported(model, tmp_path)
    assert list(facts["inputs"]) == ["ids"] and facts["preprocess"]["pad_to_context"] is True
    ids = front.batch(["a cat", "the quick brown fox jumps over", ""])["ids"]
    check(
        "padded",
        model.embed(["a cat", "the quick brown fox jumps over", ""]),
        program(ids),
        run(session, ids=ids),
    )


def test_export_keeps_the_model_and_holds_one_tower():
    model = clip().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    program = wt.export_program(model, "text")
    own = [model.tokenizers["text"], model.trunk, model.projections["text"]]
    weights = sum(p.numel() for part in own for p in part.parameters())
    assert sum(v.numel() for v in program.state_dict.values()) == weights
    assert model.training and model.trunk.blocks[0].training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_what_cannot_be_exported_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(wt.InputError, match=r"columns \['image', 'text'\]: name one"):
        wt.export_program(clip())
    with pytest.raises(wt.InputError, match="no column 'audio'"):
        wt.export_program(clip(), "audio")
    with pytest.raises(wt.InputError, match="a Transformer cannot be exported"):
        wt.export_program(wt.Transformer(8, 1, 2))
    series = wt.Classifier(wt.SeriesTokenizer(16), wt.Transformer(16, 1, 2), 3)
    with pytest.raises(wt.InputError, match="front-end is a SeriesTokenizer"):
        wt.export_program(series)
    padded = wt.ImageTokenizer(16, patch=8, size=16, preprocess={"resize": "pad"})
    with pytest.raises(wt.InputError, match="resize='pad'"):
        wt.export_program(wt.Classifier(padded, wt.Transformer(16, 1, 2), 3))
    with pytest.raises(wt.InputError, match="Recurrent"):
        wt.export_program(wt.Classifier(text_tokenizer(), wt.Recurrent("gru", 32), 3))
    with pytest.raises(wt.InputError, match=r"ends in \.onnx"):
        wt.export_onnx(clip(), tmp_path / "model", "image")
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name == "onnxscript":
            raise ImportError("No module named 'onnxscript'", name="onnxscript")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(wt.InputError, match=r"needs onnxscript: pip install worldtokens\[export\]"):
        wt.export_onnx(clip(), tmp_path / "x.onnx", "image")


@pytest.mark.parametrize("how", ["bicubic", "bilinear", "bicubic_no_antialias"])
def test_position_interpolation_in_a_graph_equals_the_resampling_filter(how):
    """Below 2e-6."""
    from worldtokens.tokenizers.patches import axis_weights, symbolic_axis_weights

    sizes = [(n, o) for o in (1, 3, 7, 16) for n in (1, 2, 5, 16, 31)]
    far = [float((axis_weights(n, o, how) - symbolic_axis_weights(n, o, how)).abs().max()) for n, o in sizes]
    assert max(far) < 2e-6
