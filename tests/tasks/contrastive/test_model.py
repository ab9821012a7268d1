"""CLIP over named columns: embedding, zero-shot, ranking, evaluation, saving, recipes."""

import io
import json
import wave

import pytest
import torch

import worldtokens as wt
from worldtokens.training.recipe import Recipe


def test_embed_accepts_every_form(model, tmp_path, emoji_rows):
    path = tmp_path / "an image.png"
    path.write_bytes(emoji_rows[0]["image"])
    from_path = model.embed("image", [path])
    from_bytes = model.embed("image", [emoji_rows[0]["image"]])
    raw = model.tokenizers["image"].read(path)
    from_raw = model.embed("image", [raw])
    pixels = model.tokenizers["image"].collate([raw])["pixels"]
    from_uint8 = model.embed("image", pixels)
    mean = torch.tensor(model.tokenizers["image"].mean).view(3, 1, 1)
    std = torch.tensor(model.tokenizers["image"].std).view(3, 1, 1)
    from_float = model.embed("image", (pixels / 255 - mean) / std)
    for other in (from_bytes, from_raw, from_uint8, from_float):
        assert (from_path - other).abs().max() < 1e-5
    assert from_path.shape == (1, 16)
    assert from_path.norm(dim=-1) == pytest.approx(1.0, abs=1e-5)
    assert model.embed("text", "a cat").shape == (1, 16)
    assert model.embed("text", []).shape == (0, 16)
    with pytest.raises(wt.InputError, match="no column 'other'"):
        model.embed("other", ["x.wav"])


def test_features_are_the_input_of_the_projection(model, emoji_rows):
    captions = [r["text"][0] for r in emoji_rows[:3]]
    features = model.features("text", captions, batch_size=2)
    assert features.shape == (3, model._trunk("text").dim)
    projected = torch.nn.functional.normalize(model.projections["text"](features), dim=-1)
    assert (projected - model.embed("text", captions)).abs().max() < 1e-6
    assert model.features("image", []).shape == (0, model._trunk("text").dim)
    with pytest.raises(wt.InputError, match="no column 'other'"):
        model.features("other", ["x.wav"])


def test_embeddings_do_not_depend_on_the_batch(model, emoji_rows):
    captions = [c for r in emoji_rows for c in r["text"]] + ["", "a " * 60]
    together = model.embed("text", captions, batch_size=7)
    alone = torch.cat([model.embed("text", [c]) for c in captions])
    assert (together - alone).abs().max() < 1e-5


def test_embed_restores_the_train_or_eval_mode(model):
    model.train()
    model.embed("text", ["a"])
    assert model.training
    model.eval()


def test_zero_shot_by_hand(model, emoji_rows):
    images = [r["image"] for r in emoji_rows[:3]]
    templates = ["an image of {}", lambda c: f"{c}!"]
    got = model.zero_shot(images, ["cat", "dog"], templates)
    vectors = []
    for c in ("cat", "dog"):
        both = model.embed("text", [f"an image of {c}", f"{c}!"])
        mean = both.mean(0)
        vectors.append(mean / mean.norm())
    logits = model.logit_scale.exp() * model.embed("image", images) @ torch.stack(vectors).T
    assert (got - logits.softmax(-1)).abs().max() < 1e-5
    assert got.sum(-1).tolist() == pytest.approx([1, 1, 1])
    with pytest.raises(wt.InputError, match="at least one class"):
        model.zero_shot(images, [])


def test_rank_orders_by_cosine(model, emoji_rows):
    q = torch.tensor([[1.0] + [0.0] * 15])
    c = torch.zeros(3, 16)
    c[0, 1], c[1, 0], c[2, 0], c[2, 1] = 5.0, 2.0, 1.0, 1.0
    order, scores = model.rank(q, c)
    assert order.tolist() == [[1, 2, 0]]
    assert scores[0].tolist() == pytest.approx([1.0, 2**-0.5, 0.0])
    ranking = model.rank(["a cat", "a dog"], [r["image"] for r in emoji_rows[:5]])
    assert ranking.order.shape == (2, 5)
    assert ranking.order.sort(1).values.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_evaluate_counts_any_of_several_captions(model, emoji_rows):
    rows = [{"image": r["image"], "text": r["text"][:3]} for r in emoji_rows]
    metrics = model.evaluate(rows, batch_size=5)
    captions = sum(len(r["text"]) for r in rows)
    assert metrics["text_to_image/queries"] == captions
    assert metrics["text_to_image/candidates"] == len(rows)
    assert metrics["image_to_text/queries"] == len(rows)
    assert metrics["image_to_text/candidates"] == captions
    # the slow reference: one cosine at a time
    images = model.embed("image", [r["image"] for r in rows])
    hits = 0
    for i, row in enumerate(rows):
        for caption in row["text"]:
            score = images @ model.embed("text", [caption])[0]
            hits += int((score >= score[i]).sum()) <= 10
    assert metrics["text_to_image/R@10"] == pytest.approx(hits / captions)
    assert metrics["mean/R@10"] == pytest.approx(
        (metrics["text_to_image/R@10"] + metrics["image_to_text/R@10"]) / 2
    )


@pytest.mark.parametrize("shared", [True, False])
def test_save_and_load(tmp_path, shared, make_clip, emoji_rows):
    model = make_clip(shared, "siglip").eval()
    model.save(tmp_path)
    again = wt.load(tmp_path)
    assert (again.embed("text", ["a cat"]) - model.embed("text", ["a cat"])).abs().max() == 0
    image = [emoji_rows[0]["image"]]
    assert (again.embed("image", image) - model.embed("image", image)).abs().max() == 0
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]


def test_three_columns_at_once(collate, emoji_rows):
    torch.manual_seed(0)
    dim = 16
    tokenizers = {
        "image": wt.ImageTokenizer(dim=dim, patch=16, size=32),
        "text": wt.TextTokenizer.clip(dim=dim),
        "drawing": wt.ImageTokenizer(dim=dim, patch=8, size=16, class_token=True),
    }
    model = wt.CLIP(tokenizers, wt.Transformer(dim, 1, 2), dim=8)
    rows = [{"image": r["image"], "text": r["text"][0], "drawing": r["image"]} for r in emoji_rows[:6]]
    del rows[2]["drawing"]
    out = model.loss(collate(model, rows))
    assert {"image-text", "image-drawing", "text-drawing"} <= set(out)
    mean = (out["image-text"] + out["image-drawing"] + out["text-drawing"]) / 3
    assert float(out["loss"]) == pytest.approx(float(mean), abs=1e-6)
    assert "drawing_to_text/R@1" in model.evaluate(rows)


def test_wrong_settings_raise():
    image = wt.ImageTokenizer(dim=32, patch=16, size=32)
    text = wt.TextTokenizer.clip(dim=16)
    trunk = wt.Transformer(32, 1, 2)
    with pytest.raises(ValueError, match="'text' tokenizer has dim=16, its trunk dim=32"):
        wt.CLIP({"image": image, "text": text}, trunk)
    with pytest.raises(ValueError, match="two or more columns"):
        wt.CLIP({"image": image}, trunk)
    with pytest.raises(ValueError, match="trunk names"):
        wt.CLIP({"image": image, "text": text}, {"image": trunk})


RECIPE = """
model:
  class: worldtokens.CLIP
  args:
    tokenizers:
      TOKENIZER
      text: {class: worldtokens.TextTokenizer, args: {vocabulary: clip, dim: 32, context: 8, end: <|endoftext|>}}
    trunk: {class: worldtokens.Transformer, args: {dim: 32, depth: 2, heads: 2}}
    dim: 16
data: {train: rows.jsonl}
optim: {lr: 3.0e-3}
train: {out: run, steps: 60, batch_size: 6, tensorboard: false, device: cpu}
"""


TOKENIZERS = {
    "image": "image: {class: worldtokens.ImageTokenizer, args: {dim: 32, patch: 16, size: 64}}",
    "audio": "audio: {class: worldtokens.AudioTokenizer, args: {dim: 32, n_mels: 40, seconds: 1.0}}",
}


@pytest.mark.parametrize("column", TOKENIZERS)
def test_another_tokenizer_is_one_line_of_a_recipe(column, tmp_path, monkeypatch, emoji_rows):
    """Audio instead of images: one changed line, the same rows; both recipes memorise their rows."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for i, name in enumerate(("low", "high", "shrill", "deep", "soft", "bright")):
        (tmp_path / f"{i}.png").write_bytes(emoji_rows[4 * i]["image"])
        with wave.open(str(tmp_path / f"{i}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            tone = torch.sin(torch.arange(4800) * 0.03 * (i + 1)) * 20000
            file.writeframes(tone.to(torch.int16).numpy().tobytes())
        rows.append({"image": f"{i}.png", "audio": f"{i}.wav", "text": name})
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("TOKENIZER", TOKENIZERS[column]))
    recipe = Recipe.read("recipe.yaml")
    model, report = recipe.run()
    assert model.columns == [column, "text"] and report.steps == 60
    assert model.evaluate(recipe.rows()[0])[f"text_to_{column}/R@1"] == 1.0


def test_token_dropout_in_training_does_not_change_evaluation(collate, emoji_rows):
    """FLIP: `TokenReducer` drops half of an image's tokens in training, pooling still uses the class token, and embeddings
    in eval mode equal those of the full image."""
    torch.manual_seed(0)
    whole = wt.ImageTokenizer(dim=32, patch=8, size=32, class_token=True)
    text = wt.TextTokenizer.clip(dim=32)
    trunk = wt.Transformer(32, 2, 2)
    model = wt.CLIP({"image": whole, "text": text}, trunk, 16).eval()
    half = wt.CLIP({"image": wt.TokenReducer(whole, keep=0.5), "text": text}, trunk, 16).eval()
    half.projections.load_state_dict(model.projections.state_dict())
    assert half.pooling["image"] == model.pooling["image"] == "first"
    assert half.pooling["text"] == "last"
    image = [emoji_rows[0]["image"]]
    assert (half.embed("image", image) - model.embed("image", image)).abs().max() < 1e-6
    lengths = []
    trunk.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    batch = collate(half, [{"image": emoji_rows[0]["image"], "text": "a"}])
    half.train()(batch)
    assert lengths[0] == 1 + 8  # class token and half of 16 patches


def test_retrieval_table_lists_every_pair(model, make_trimodal_clip, trimodal_rows):
    from rich.console import Console

    rows = trimodal_rows(6)
    net = make_trimodal_clip().eval()
    metrics = net.evaluate(rows)
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(wt.retrieval_table(metrics, "six rows"))
    text = console.export_text()
    for a, b in (("image", "text"), ("text", "audio"), ("audio", "image")):
        assert f"{a}-to-{b}" in text and f"{b}-to-{a}" in text
    assert text.count("of 6") == 6 and "six rows" in text
    assert f"{100 * metrics['image_to_text/R@1']:.1f}" in text and "16.7" in text


def test_a_tuple_is_one_value_and_a_list_several():
    """A (waveform, sample_rate) tuple is one audio: reading and evaluating keep it whole, in a list too."""
    audio = wt.AudioTokenizer(48, positions="sincos")
    text = wt.TextTokenizer.clip(dim=48, context=16)
    model = wt.CLIP({"audio": audio, "text": text}, wt.Transformer(dim=48, depth=1, heads=2), dim=16)
    waveforms = [torch.sin(torch.arange(4000) * f) for f in (0.1, 0.2, 0.3)]
    rows = [{"audio": (w, 16000), "text": "a"} for w in waveforms]
    assert torch.equal(model.read(rows[0])["audio"], audio.read(waveforms[0], 16000))
    several = {"audio": [(waveforms[1], 16000), (waveforms[2], 16000)], "text": "b"}
    assert torch.equal(model.read(several)["audio"], audio.read(waveforms[1], 16000))
    assert model.evaluate([rows[0], several])["text_to_audio/R@10"] == 1.0
