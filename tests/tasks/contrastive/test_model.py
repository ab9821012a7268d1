"""CLIP over named columns: losses against open_clip's, figures by hand, what a person asks of it."""

import io
import json
import math
import subprocess
import sys
import wave

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.tasks.metrics.retrieval import chance, ranks, summary
from worldtokens.training.recipe import Recipe

ROWS = samples.open("emoji", split="validation")[:24]


def make(shared=True, loss="clip", **options):
    torch.manual_seed(0)
    dim = 32
    tokenizers = {
        "image": wt.ImageTokenizer(dim=dim, patch=16, size=32),
        "text": wt.TextTokenizer.clip(dim=dim),
    }
    trunk = lambda: wt.Transformer(dim, 2, 2)  # noqa: E731
    return wt.CLIP(
        tokenizers, trunk() if shared else {k: trunk() for k in tokenizers}, 16, loss=loss, **options
    )


@pytest.fixture(scope="module")
def model():
    return make().eval()


def batch_of(model, rows):
    return model.collate([model.read(r) for r in rows])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_loss_is_open_clips_and_reaches_every_parameter(shared, kind):
    model = make(shared, kind)
    rows = [{"image": r["image"], "text": r["text"][0]} for r in ROWS[:8]]
    batch = batch_of(model, rows)
    found = model(batch)
    a, b = found["image"], found["text"]
    logits = model.logit_scale.exp() * a @ b.T
    if kind == "clip":
        target = torch.arange(8)
        want = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    else:
        sign = 2 * torch.eye(8) - 1
        want = -F.logsigmoid(sign * (logits + model.logit_bias)).sum() / 8
    got = model.loss(batch)["loss"]
    assert abs(float((got - want).detach())) < 1e-4
    got.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name


def test_rows_may_lack_a_column(model):
    """Rows without an image count nothing; the loss is that of the whole rows."""
    whole = [{"image": r["image"], "text": r["text"][0]} for r in ROWS[:4]]
    mixed = [whole[0], {"text": "alone"}, whole[1], {"image": ROWS[9]["image"]}, whole[2], whole[3]]
    a = model.loss(batch_of(model, whole))["loss"]
    b = model.loss(batch_of(model, mixed))["loss"]
    assert abs(float((a - b).detach())) < 1e-5
    alone = model.loss(batch_of(model, [{"text": "one"}, {"text": "two"}]))
    assert float(alone["loss"]) == 0.0
    alone["loss"].backward()  # a batch without an image still has a graph
    model.zero_grad()
    with pytest.raises(wt.InputError, match="none of this task's"):
        model.read({"sound": "x.wav"})


def test_the_scale_stays_within_bounds_and_can_come_back():
    model = make()
    with torch.no_grad():
        model.logit_scale.fill_(9.0)
    batch = batch_of(model, [{"image": r["image"], "text": r["text"][0]} for r in ROWS[:4]])
    out = model.loss(batch)
    assert float(out["scale"]) == pytest.approx(100.0)
    out["loss"].backward()
    assert float(model.logit_scale.grad) != 0.0


def test_embed_takes_every_form(model, tmp_path):
    path = tmp_path / "an image.png"
    path.write_bytes(ROWS[0]["image"])
    from_path = model.embed("image", [path])
    from_bytes = model.embed("image", [ROWS[0]["image"]])
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
    with pytest.raises(wt.InputError, match="no column 'sound'"):
        model.embed("sound", ["x.wav"])


def test_features_are_what_the_projection_reads(model):
    words = [r["text"][0] for r in ROWS[:3]]
    seen = model.features("text", words, batch_size=2)
    assert seen.shape == (3, model._trunk("text").dim)
    made = torch.nn.functional.normalize(model.projections["text"](seen), dim=-1)
    assert (made - model.embed("text", words)).abs().max() < 1e-6
    assert model.features("image", []).shape == (0, model._trunk("text").dim)
    with pytest.raises(wt.InputError, match="no column 'sound'"):
        model.features("sound", ["x.wav"])


def test_a_batch_embeds_as_one_by_one(model):
    captions = [c for r in ROWS for c in r["text"]] + ["", "a " * 60]
    together = model.embed("text", captions, batch_size=7)
    alone = torch.cat([model.embed("text", [c]) for c in captions])
    assert (together - alone).abs().max() < 1e-5


def test_embed_leaves_the_mode_as_it_was(model):
    model.train()
    model.embed("text", ["a"])
    assert model.training
    model.eval()


def test_zero_shot_by_hand(model):
    pictures = [r["image"] for r in ROWS[:3]]
    templates = ["an image of {}", lambda c: f"{c}!"]
    got = model.zero_shot(pictures, ["cat", "dog"], templates)
    vectors = []
    for c in ("cat", "dog"):
        both = model.embed("text", [f"an image of {c}", f"{c}!"])
        mean = both.mean(0)
        vectors.append(mean / mean.norm())
    logits = model.logit_scale.exp() * model.embed("image", pictures) @ torch.stack(vectors).T
    assert (got - logits.softmax(-1)).abs().max() < 1e-5
    assert got.sum(-1).tolist() == pytest.approx([1, 1, 1])
    with pytest.raises(wt.InputError, match="at least one class"):
        model.zero_shot(pictures, [])


def test_rank_orders_by_cosine(model):
    q = torch.tensor([[1.0] + [0.0] * 15])
    c = torch.zeros(3, 16)
    c[0, 1], c[1, 0], c[2, 0], c[2, 1] = 5.0, 2.0, 1.0, 1.0
    order, scores = model.rank(q, c)
    assert order.tolist() == [[1, 2, 0]]
    assert scores[0].tolist() == pytest.approx([1.0, 2**-0.5, 0.0])
    ranking = model.rank(["a cat", "a dog"], [r["image"] for r in ROWS[:5]])
    assert ranking.order.shape == (2, 5)
    assert ranking.order.sort(1).values.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_ranks_by_hand():
    candidates = F.normalize(torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]]))
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert ranks(queries, candidates, ["a", "a", "c"], ["a", "b", "c"]).tolist() == [0, 2, 2]
    # two true candidates: the better one counts
    assert ranks(queries[:1], candidates, ["a"], ["b", "a", "a"]).tolist() == [1]
    with pytest.raises(ValueError, match="no true candidate"):
        ranks(queries[:1], candidates, ["z"], ["a", "b", "c"])


def test_a_collapsed_model_finds_nothing():
    """Ties and NaN do not count as found: one vector for everything gives the last rank, not the first."""
    same = torch.ones(5, 4) / 2
    assert ranks(same, same, range(5), range(5)).tolist() == [4] * 5
    assert ranks(same * torch.nan, same, range(5), range(5)).tolist() == [4] * 5


def test_summary_and_chance():
    figures = summary(torch.tensor([0, 3, 11, 5]), [0, 1, 2, 3], list(range(20)))
    assert figures["R@1"] == 0.25 and figures["R@5"] == 0.5 and figures["R@10"] == 0.75
    assert figures["chance@10"] == pytest.approx(0.5)
    assert figures["median_rank"] == 4
    assert chance(5, 2, 1) == pytest.approx(0.4)
    # two of five true, two drawn: 1 - 3/5 * 2/4
    assert chance(5, 2, 2) == pytest.approx(0.7)
    assert chance(3, 1, 10) == 1.0
    assert chance(100_000, 5, 10) == pytest.approx(1 - math.comb(99_995, 10) / math.comb(100_000, 10))


def test_evaluate_counts_any_of_several_captions(model):
    rows = [{"image": r["image"], "text": r["text"][:3]} for r in ROWS]
    figures = model.evaluate(rows, batch_size=5)
    captions = sum(len(r["text"]) for r in rows)
    assert figures["text_to_image/queries"] == captions
    assert figures["text_to_image/candidates"] == len(rows)
    assert figures["image_to_text/queries"] == len(rows)
    assert figures["image_to_text/candidates"] == captions
    # the slow twin: cosine by cosine
    pictures = model.embed("image", [r["image"] for r in rows])
    hits = 0
    for i, row in enumerate(rows):
        for caption in row["text"]:
            score = pictures @ model.embed("text", [caption])[0]
            hits += int((score >= score[i]).sum()) <= 10
    assert figures["text_to_image/R@10"] == pytest.approx(hits / captions)
    assert figures["mean/R@10"] == pytest.approx(
        (figures["text_to_image/R@10"] + figures["image_to_text/R@10"]) / 2
    )


@pytest.mark.parametrize("shared", [True, False])
def test_save_and_load(tmp_path, shared):
    model = make(shared, "siglip").eval()
    model.save(tmp_path)
    again = wt.load(tmp_path)
    assert (again.embed("text", ["a cat"]) - model.embed("text", ["a cat"])).abs().max() == 0
    picture = [ROWS[0]["image"]]
    assert (again.embed("image", picture) - model.embed("image", picture)).abs().max() == 0
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]


def test_three_columns_at_once():
    torch.manual_seed(0)
    dim = 16
    tokenizers = {
        "image": wt.ImageTokenizer(dim=dim, patch=16, size=32),
        "text": wt.TextTokenizer.clip(dim=dim),
        "drawing": wt.ImageTokenizer(dim=dim, patch=8, size=16, class_token=True),
    }
    model = wt.CLIP(tokenizers, wt.Transformer(dim, 1, 2), dim=8)
    rows = [{"image": r["image"], "text": r["text"][0], "drawing": r["image"]} for r in ROWS[:6]]
    del rows[2]["drawing"]
    out = model.loss(batch_of(model, rows))
    assert {"image-text", "image-drawing", "text-drawing"} <= set(out)
    mean = (out["image-text"] + out["image-drawing"] + out["text-drawing"]) / 3
    assert float(out["loss"]) == pytest.approx(float(mean), abs=1e-6)
    assert "drawing_to_text/R@1" in model.evaluate(rows)


def test_wrong_settings_are_named():
    image = wt.ImageTokenizer(dim=32, patch=16, size=32)
    text = wt.TextTokenizer.clip(dim=16)
    trunk = wt.Transformer(32, 1, 2)
    with pytest.raises(ValueError, match="'text' front-end gives tokens 16 wide, its trunk takes 32"):
        wt.CLIP({"image": image, "text": text}, trunk)
    with pytest.raises(ValueError, match="two or more columns"):
        wt.CLIP({"image": image}, trunk)
    with pytest.raises(ValueError, match="trunk names"):
        wt.CLIP({"image": image, "text": text}, {"image": trunk})


def test_rows_that_show_the_same_thing_are_no_negatives():
    """Two rows of one caption: neither counts against the other; `same=[]` gives open_clip's plain loss."""
    model, plain = make().eval(), make(same=[]).eval()
    plain.load_state_dict(model.state_dict())
    rows = [{"image": r["image"], "text": r["text"][0]} for r in ROWS[:5]]
    rows[3]["text"] = rows[0]["text"]
    batch = batch_of(model, rows)
    a, b = (model(batch)[k] for k in ("image", "text"))
    logits = model.logit_scale.exp() * a @ b.T
    target = torch.arange(5)
    all_others = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    assert abs(float((plain.loss(batch_of(plain, rows))["loss"] - all_others).detach())) < 1e-4
    logits[0, 3] = logits[3, 0] = -torch.inf
    want = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    assert abs(float((model.loss(batch)["loss"] - want).detach())) < 1e-4
    assert abs(float((want - all_others).detach())) > 1e-3


def test_smoothing_is_cross_entropys():
    """torch's label smoothing as the reference, over the candidates that are left where two rows are alike."""
    model = make(label_smoothing=0.2).eval()
    rows = [{"image": r["image"], "text": r["text"][0]} for r in ROWS[:6]]
    batch = batch_of(model, rows)
    a, b = (model(batch)[k] for k in ("image", "text"))
    logits, target = model.logit_scale.exp() * a @ b.T, torch.arange(6)
    each = (F.cross_entropy(x, target, label_smoothing=0.2) for x in (logits, logits.T))
    assert abs(float((model.loss(batch)["loss"] - sum(each) / 2).detach())) < 1e-4
    rows[3]["text"] = rows[0]["text"]
    batch = batch_of(model, [*rows, {"text": "alone"}])
    a, b = (model(batch)[k] for k in ("image", "text"))
    logits, total = model.logit_scale.exp() * a @ b[:6].T, 0.0
    for i in range(6):
        left = [j for j in range(6) if j == i or {i, j} != {0, 3}]
        for x in (logits[i, left], logits[left, i]):
            total += F.cross_entropy(x, torch.tensor(left.index(i)), label_smoothing=0.2) / 12
    loss = model.loss(batch)["loss"]
    assert abs(float((loss - total).detach())) < 1e-4
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    for wrong in ({"label_smoothing": 1.0}, {"label_smoothing": 0.1, "loss": "siglip"}):
        with pytest.raises(ValueError, match="0 <= label_smoothing < 1 with 'clip'"):
            make(**wrong)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_alike_by_a_column_without_a_front_end(kind):
    """Images of one object under different words: `same=["object"]`; a batch of one object alone has nothing to tell
    apart, and gives a finite loss."""
    torch.manual_seed(0)
    model = make(loss=kind, same=["object"]).eval()
    rows = [
        {"image": r["image"], "text": r["text"][0], "object": f"o{i // 2}"} for i, r in enumerate(ROWS[:6])
    ]
    batch = batch_of(model, rows)
    a, b = (model(batch)[k] for k in ("image", "text"))
    logits = model.logit_scale.exp() * a @ b.T + (0 if kind == "clip" else model.logit_bias)
    total = torch.zeros(())
    for i in range(6):
        others = [j for j in range(6) if j // 2 != i // 2]
        if kind == "siglip":
            total = total - F.logsigmoid(logits[i, i]) - F.logsigmoid(-logits[i, others]).sum()
        else:
            for row in (logits[i], logits[:, i]):
                total = total - (row[i] - row[[i, *others]].logsumexp(0)) / 2
    assert abs(float((model.loss(batch)["loss"] - total / 6).detach())) < 1e-4
    one = model.loss(batch_of(model, rows[:2]))["loss"]
    assert one.isfinite()
    one.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def three(**options):
    torch.manual_seed(0)
    dim = 16
    tokenizers = {
        "image": wt.ImageTokenizer(dim=dim, patch=16, size=32),
        "text": wt.TextTokenizer.clip(dim=dim, context=16),
        "audio": wt.AudioTokenizer(
            dim=dim, stem="patches", n_mels=16, patch=(8, 16), seconds=1.0, positions="sincos"
        ),
    }
    return wt.CLIP(tokenizers, wt.Transformer(dim, 1, 2), dim=8, **options)


def triples(n):
    beep = lambda i: (torch.sin(torch.arange(4000) * 0.02 * (i + 1)), 16000)  # noqa: E731
    return [{"image": r["image"], "text": r["text"][0], "audio": beep(i)} for i, r in enumerate(ROWS[:n])]


def test_the_loss_is_over_the_pairs_that_are_named():
    rows = triples(5)
    all_pairs, two = three().eval(), three(pairs=[["image", "text"], ["audio", "image"]]).eval()
    whole = all_pairs.loss(batch_of(all_pairs, rows))
    found = two.loss(batch_of(two, rows))
    assert set(found) == {"loss", "scale", "image-text", "audio-image"}
    mean = (whole["image-text"] + whole["image-audio"]) / 2
    assert float(found["loss"].detach()) == pytest.approx(float(mean), abs=1e-5)
    assert "text_to_audio/R@10" in two.evaluate(rows)  # measured all the same
    for wrong in ([], [["image", "image"]], [["image", "video"]], [["image", "text"], ["text", "image"]]):
        with pytest.raises(ValueError, match="expected different pairs"):
            three(pairs=wrong)


def test_each_row_lacks_another_column():
    """The pairs of columns have different rows; each pair's loss is that of its own rows alone."""
    rows = triples(7)
    del rows[0]["image"], rows[1]["text"], rows[2]["audio"], rows[3]["audio"], rows[3]["text"]
    model = three().eval()
    out = model.loss(batch_of(model, rows))
    losses = []
    for a, b in (("image", "text"), ("image", "audio"), ("text", "audio")):
        both = [{a: r[a], b: r[b]} for r in rows if a in r and b in r]
        losses.append(model.loss(batch_of(model, both))["loss"].detach())
        assert float(out[f"{a}-{b}"]) == pytest.approx(float(losses[-1]), abs=1e-5)
    assert float(out["loss"].detach()) == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)


@pytest.mark.parametrize("column", ["image", "text", "audio"])
def test_a_batch_without_a_whole_modality_trains(column):
    rows = triples(4)
    for row in rows:
        del row[column]
    model = three()
    out = model.loss(batch_of(model, rows))
    left = [k for k in ("image", "text", "audio") if k != column]
    assert f"{left[0]}-{left[1]}" in out and len(out) == 3
    out["loss"].backward()
    assert all(p.grad.abs().max() > 0 for p in model.trunk.parameters() if p.ndim > 1)
    assert all(p.grad is None for p in model.tokenizers[column].parameters())


RECIPE = """
model:
  class: worldtokens.CLIP
  args:
    tokenizers:
      FRONT
      text: {class: worldtokens.TextTokenizer, args: {vocabulary: clip, dim: 32, context: 8, end: <|endoftext|>}}
    trunk: {class: worldtokens.Transformer, args: {dim: 32, depth: 2, heads: 2}}
    dim: 16
data: {train: rows.jsonl}
optim: {lr: 3.0e-3}
train: {out: run, steps: 60, batch_size: 6, tensorboard: false, device: cpu}
"""
FRONTS = {
    "image": "image: {class: worldtokens.ImageTokenizer, args: {dim: 32, patch: 16, size: 64}}",
    "audio": "audio: {class: worldtokens.AudioTokenizer, args: {dim: 32, n_mels: 40, seconds: 1.0}}",
}


@pytest.mark.parametrize("column", FRONTS)
def test_another_front_end_is_one_line_of_a_recipe(column, tmp_path, monkeypatch):
    """Sounds in place of images: one line changed, the same files of rows; either learns what it is shown."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for i, name in enumerate(("low", "high", "shrill", "deep", "soft", "bright")):
        (tmp_path / f"{i}.png").write_bytes(ROWS[4 * i]["image"])
        with wave.open(str(tmp_path / f"{i}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            tone = torch.sin(torch.arange(4800) * 0.03 * (i + 1)) * 20000
            file.writeframes(tone.to(torch.int16).numpy().tobytes())
        rows.append({"image": f"{i}.png", "audio": f"{i}.wav", "text": name})
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("FRONT", FRONTS[column]))
    recipe = Recipe.read("recipe.yaml")
    model, report = recipe.run()
    assert model.columns == [column, "text"] and report.steps == 60
    assert model.evaluate(recipe.rows()[0])[f"text_to_{column}/R@1"] == 1.0


def test_tokens_left_out_in_training_leave_answers_alone():
    """FLIP: `TokenReducer` drops half of an image's tokens in training, pooling still finds the class token, and embeddings
    in eval mode are those of the whole image."""
    torch.manual_seed(0)
    whole = wt.ImageTokenizer(dim=32, patch=8, size=32, class_token=True)
    text = wt.TextTokenizer.clip(dim=32)
    trunk = wt.Transformer(32, 2, 2)
    model = wt.CLIP({"image": whole, "text": text}, trunk, 16).eval()
    half = wt.CLIP({"image": wt.TokenReducer(whole, keep=0.5), "text": text}, trunk, 16).eval()
    half.projections.load_state_dict(model.projections.state_dict())
    assert half.pooling["image"] == model.pooling["image"] == "first"
    assert half.pooling["text"] == "last"
    picture = [ROWS[0]["image"]]
    assert (half.embed("image", picture) - model.embed("image", picture)).abs().max() < 1e-6
    seen = []
    trunk.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    batch = batch_of(half, [{"image": ROWS[0]["image"], "text": "a"}])
    half.train()(batch)
    assert seen[0] == 1 + 8  # class token, half of 16 patches


def test_retrieval_table_tells_every_pair(model):
    from rich.console import Console

    rows = triples(6)
    net = three().eval()
    figures = net.evaluate(rows)
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(wt.retrieval_table(figures, "six rows"))
    text = console.export_text()
    for a, b in (("image", "text"), ("text", "audio"), ("audio", "image")):
        assert f"{b} by {a}" in text and f"{a} by {b}" in text
    assert text.count("of 6") == 6 and "six rows" in text
    assert f"{100 * figures['image_to_text/R@1']:.1f}" in text and "16.7" in text


KINDS = {"clip": {}, "siglip": {"loss": "siglip"}, "standardize": {"standardize": True}}


def _one_of_two(rank, folder, kind):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = make(**KINDS[kind])
    model.loss(batch_of(model, uneven()[3 * rank : 3 * rank + 3]))["loss"].backward()
    for p in model.parameters():  # what DDP does
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        torch.distributed.all_reduce(p.grad)
        p.grad /= 2
    if rank == 0:
        torch.save({k: p.grad for k, p in model.named_parameters()}, f"{folder}/grads.pt")
    torch.distributed.destroy_process_group()


def uneven():
    """Six rows of which the second process has fewer pairs than the first; two, one on each process, share a caption."""
    rows = [{"image": r["image"], "text": r["text"][0]} for r in ROWS[:6]]
    rows[3]["text"] = rows[0]["text"]
    del rows[4]["image"], rows[5]["text"]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_with_uneven_pairs_equal_one(tmp_path, kind):
    """Max abs difference of a gradient below 1e-5 of its largest value (of 1 where that is smaller), where processes hold three and one pair."""
    both = [subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path), kind]) for rank in (0, 1)]
    assert [p.wait(300) for p in both] == [0, 0]
    got = torch.load(tmp_path / "grads.pt")
    model = make(**KINDS[kind])
    model.loss(batch_of(model, uneven()))["loss"].backward()
    for name, p in model.named_parameters():
        assert (got[name] - p.grad).abs().max() < 1e-5 * p.grad.abs().max().clamp(min=1), name


if __name__ == "__main__":
    _one_of_two(int(sys.argv[1]), *sys.argv[2:])


def test_a_tuple_is_one_value_and_a_list_several():
    """(waveform, sample_rate) is how a sound is given: reading a row and evaluating leave it whole, in a list too."""
    ear = wt.AudioTokenizer(48, positions="sincos")
    text = wt.TextTokenizer.clip(dim=48, context=16)
    model = wt.CLIP({"audio": ear, "text": text}, wt.Transformer(dim=48, depth=1, heads=2), dim=16)
    waves = [torch.sin(torch.arange(4000) * f) for f in (0.1, 0.2, 0.3)]
    rows = [{"audio": (w, 16000), "text": "a"} for w in waves]
    assert torch.equal(model.read(rows[0])["audio"], ear.read(waves[0], 16000))
    several = {"audio": [(waves[1], 16000), (waves[2], 16000)], "text": "b"}
    assert torch.equal(model.read(several)["audio"], ear.read(waves[1], 16000))
    assert model.evaluate([rows[0], several])["text_to_audio/R@10"] == 1.0
