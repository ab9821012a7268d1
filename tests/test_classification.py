"""Classifier and pooling: losses and figures by hand, labels by name or number, any front-end, save and load."""

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt
from worldtokens.backbone.pooling import behind, pool_tokens
from worldtokens.data import samples

ROWS = samples.open("emoji", split="validation")[:24]
NAMES = ["face", "animal", "food"]


def make(classes=NAMES, column=None, **options):
    torch.manual_seed(0)
    front = wt.ImageTokenizer(dim=32, patch=8, size=32, class_token=True, registers=2, draft=False)
    return wt.Classifier(
        front if column is None else {column: front}, wt.Transformer(32, 2, 2), classes, **options
    )


def labelled(n=8):
    return [{"image": r["image"], "label": NAMES[i % 3]} for i, r in enumerate(ROWS[:n])]


def batch_of(model, rows):
    return model.collate([model.read(r) for r in rows])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_is_cross_entropy_with_smoothing_and_reaches_every_parameter(smoothing):
    pool = wt.AttentionPool(32, heads=2, skip=3)
    model = make(pool=pool, pool_norm=True, label_smoothing=smoothing)
    batch = batch_of(model, labelled())
    target = torch.tensor([i % 3 for i in range(8)])
    assert batch["label"].tolist() == target.tolist()
    logp = model(batch).log_softmax(-1)
    right = logp.gather(1, target[:, None])[:, 0]
    want = -((1 - smoothing) * right + smoothing * logp.mean(-1)).mean()
    out = model.loss(batch)
    assert abs(float((out["loss"] - want).detach())) < 1e-6
    assert float(out["top1"]) == float((logp.argmax(-1) == target).float().mean())
    out["loss"].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name


def test_labels_by_name_number_and_cell():
    model = make()
    assert [model.number(v) for v in ("animal", 1, "1", torch.tensor(1))] == [1, 1, 1, 1]
    for wrong in ("cloud", 3, -1, 1.0, True, "3", None):
        with pytest.raises(wt.InputError, match="label is"):
            model.number(wrong)
    assert make(classes=4).number(3) == 3
    with pytest.raises(wt.InputError, match="no 'label'"):
        model.loss(batch_of(model, [{"image": ROWS[0]["image"]}]))


def test_predict_and_evaluate_by_hand(tmp_path):
    model = make(classes=[f"c{i}" for i in range(7)]).eval()
    path = tmp_path / "one.png"
    path.write_bytes(ROWS[0]["image"])
    pictures = [path] + [r["image"] for r in ROWS[1:12]]
    logits = model(
        {"image": model.tokenizers["image"].collate([model.tokenizers["image"].read(p) for p in pictures])}
    )
    names, p = model.predict(pictures, top=3, batch_size=5)
    order = logits.detach().argsort(-1, descending=True)
    assert names == [[f"c{i}" for i in row[:3]] for row in order.tolist()]
    assert (p - logits.softmax(-1).sort(-1, descending=True).values[:, :3]).abs().max() < 1e-6
    assert model.predict(str(path)).names[0][:3] == names[0]
    assert model.predict(pictures[:1], top=99).probabilities.sum() == pytest.approx(1)
    # the second-best class as the truth of six pictures, the sixth-best of six
    truth = [int(row[1 if i < 6 else 5]) for i, row in enumerate(order)]
    rows = [{"image": s, "label": t} for s, t in zip(pictures, truth, strict=True)]
    model.train()
    got = model.evaluate(rows, batch_size=5)
    assert model.training
    want = float(F.cross_entropy(logits.detach(), torch.tensor(truth)))
    assert got == {"top1": 0.0, "top5": 0.5, "loss": pytest.approx(want, abs=1e-5)}
    with pytest.raises(wt.InputError, match="row 1 lacks"):
        model.evaluate([rows[0], {"image": path}])


def test_it_learns_a_dozen_pictures_by_heart():
    model, rows = make(), labelled(12)
    before = model.evaluate(rows)
    optim = torch.optim.AdamW(model.parameters(), 3e-3)
    batch = batch_of(model, rows)
    for _ in range(80):
        optim.zero_grad()
        model.loss(batch)["loss"].backward()
        optim.step()
    after = model.evaluate(rows)
    assert after["top1"] == 1.0 and before["top1"] < 0.7 and after["loss"] < before["loss"] / 4


def test_any_front_end_under_any_name():
    torch.manual_seed(0)
    front = wt.TextTokenizer.clip(dim=32)
    model = wt.Classifier({"caption": front}, wt.Transformer(32, 2, 2), ["short", "long"]).eval()
    texts = ["a", "a cat that sits on a mat and looks at the moon", "two dogs"]
    together = model.logits(texts)
    alone = torch.cat([model.logits([t]) for t in texts])
    assert model.pool == "last" and (together - alone).abs().max() < 1e-5
    out = model.loss(
        batch_of(model, [{"caption": texts[0], "label": 0}, {"caption": texts[1], "label": "long"}])
    )
    assert out["loss"].isfinite()
    lstm = wt.Classifier(front, wt.Recurrent("lstm", 32, 1), 2, pool="mean", pool_norm=True)
    assert lstm.logits(texts).shape == (3, 2)
    with pytest.raises(wt.InputError, match="the column 'caption'"):
        model({"text": texts})
    with pytest.raises(ValueError, match="one column"):
        wt.Classifier({"a": front, "b": front}, wt.Transformer(32, 1, 2), 2)


@pytest.mark.parametrize("pool", ["patches", "attention"])
def test_save_and_load(pool, tmp_path):
    how = wt.AttentionPool(32, heads=2, skip=3) if pool == "attention" else pool
    model = make(column="photo", pool=how, pool_norm=True).eval()
    again = wt.load(model.save(tmp_path / "m"))
    pictures = [r["image"] for r in ROWS[:3]]
    assert torch.equal(model.logits(pictures), again.logits(pictures))
    assert again.names == NAMES and again.column == "photo"


def test_without_a_head_it_gives_features():
    model = make(classes=0).eval()
    assert model.logits([ROWS[0]["image"]]).shape == (1, 32)
    with pytest.raises(wt.InputError, match="no head"):
        model.predict([ROWS[0]["image"]])


# ---- pooling and what front-ends and trunk gained ----------------------------------------------------------


def ragged():
    torch.manual_seed(1)
    x = torch.randn(3, 6, 32)
    lengths = [6, 4, 2]
    valid = torch.arange(6) < torch.tensor(lengths)[:, None]
    x[~valid] = float("nan")
    return wt.Tokens(x=x, valid=valid, layout=wt.Layout.simple(lengths, "together"))


def test_pooling_ignores_padding_packing_and_skipped_tokens():
    tokens = ragged()
    pool = wt.AttentionPool(32, heads=4, skip=1)
    got = pool(tokens)
    for i, n in enumerate([6, 4, 2]):
        alone = wt.Tokens(x=tokens.x[i : i + 1, 1:n])
        assert (got[i] - wt.AttentionPool.forward(_without_skip(pool), alone)[0]).abs().max() < 1e-5
        assert (pool_tokens(tokens, "patches", 1)[i] - tokens.x[i, 1:n].mean(0)).abs().max() < 1e-6
    packed = tokens.pack(8)
    assert len(packed) == 2
    assert (pool(packed) - got).abs().max() < 1e-5
    assert (pool_tokens(packed, "patches", 1) - pool_tokens(tokens, "patches", 1)).abs().max() < 1e-6
    assert (pool(tokens.replace(layout=None)) - got).abs().max() < 1e-5
    assert behind(tokens, 3).layout.lengths == ((3,), (1,), ())
    # a sample with nothing behind its first tokens gives zeros, and gradients stay finite
    pool.skip = 3
    out = pool(tokens)
    assert out[2].abs().max() == 0 and out.isfinite().all()
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in pool.parameters())


def _without_skip(pool):
    other = wt.AttentionPool(32, heads=4)
    other.load_state_dict(pool.state_dict())
    return other


def test_registers_stand_behind_the_class_token():
    front = wt.ImageTokenizer(dim=32, patch=8, size=32, class_token=True, registers=2)
    tokens = front.tokens([ROWS[0]["image"]])
    assert tokens.shape[1] == 3 + 16 and front.prefix == 3
    assert torch.equal(tokens.x[0, 0], front.class_token[0, 0])
    assert torch.equal(tokens.x[0, 1:3], front.registers[0])
    assert tokens.pos[0, :3].tolist() == [[0, 0, 0], [-1, 0, 0], [-2, 0, 0]]
    wt.testing.check_tokenizer(front, [r["image"] for r in ROWS[:3]])
    native = wt.ImageTokenizer(dim=32, patch=8, size=None, max_tokens=20, registers=1, span=4)
    wt.testing.check_tokenizer(native, [r["image"] for r in ROWS[:3]])


def test_span_counts_every_grid_alike():
    front = wt.ImageTokenizer(dim=32, patch=8, size=32, span=(8, 16))
    pos = front(torch.zeros(1, 3, 16, 32)).pos[0]  # 2 rows, 4 columns
    assert pos[:, 1].unique().tolist() == [0, 4] and pos[:, 2].unique().tolist() == [0, 4, 8, 12]
    native = wt.ImageTokenizer(dim=32, patch=8, size=None, span=(8, 16))
    batch = native.collate(
        [torch.zeros(3, 16, 32, dtype=torch.uint8), torch.zeros(3, 8, 8, dtype=torch.uint8)]
    )
    assert torch.equal(native(batch).pos[0], pos)
    with pytest.raises(wt.InputError, match="crop is"):
        wt.ImageTokenizer(dim=32, size=None, crop=0.9)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norms_before_the_first_block_and_inside_the_feed_forward(norm):
    torch.manual_seed(0)
    trunk = wt.Transformer(32, 1, 2, norm=norm, first_norm=True, mlp_norm=True, activation="gelu_tanh")
    for p in trunk.parameters():
        torch.nn.init.normal_(p, std=0.3)
    plain = wt.Transformer(32, 1, 2, norm=norm, mlp_norm=True, activation="gelu_tanh")
    plain.load_state_dict({k: v for k, v in trunk.state_dict().items() if not k.startswith("first_norm")})
    tokens = ragged()
    whole = wt.Tokens(
        x=torch.where(tokens.valid[..., None], tokens.x, 0.0), valid=tokens.valid, layout=tokens.layout
    )
    want = plain(whole.replace(x=trunk.first_norm(whole.x)))
    assert (trunk(tokens).x - want.x).abs().max() < 1e-5
    mlp, x = trunk.blocks[0].mlp, torch.randn(5, 32)
    want = mlp.fc2(mlp.norm(F.gelu(mlp.fc1(x), approximate="tanh")))
    assert torch.equal(mlp(x), want)
