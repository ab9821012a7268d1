"""The contrastive loss: against open_clip, false negatives, label smoothing, missing columns, pairs."""

import pytest
import torch
import torch.nn.functional as F

import worldtokens as wt


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_loss_equals_open_clip_and_reaches_every_parameter(shared, kind, make_clip, collate, emoji_rows):
    model = make_clip(shared, kind)
    rows = [{"image": r["image"], "text": r["text"][0]} for r in emoji_rows[:8]]
    batch = collate(model, rows)
    embeddings = model(batch)
    a, b = embeddings["image"], embeddings["text"]
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


def test_rows_may_lack_a_column(model, collate, emoji_rows):
    """Incomplete rows do not contribute; the loss equals that of the complete rows."""
    whole = [{"image": r["image"], "text": r["text"][0]} for r in emoji_rows[:4]]
    mixed = [whole[0], {"text": "alone"}, whole[1], {"image": emoji_rows[9]["image"]}, whole[2], whole[3]]
    a = model.loss(collate(model, whole))["loss"]
    b = model.loss(collate(model, mixed))["loss"]
    assert abs(float((a - b).detach())) < 1e-5
    alone = model.loss(collate(model, [{"text": "one"}, {"text": "two"}]))
    assert float(alone["loss"]) == 0.0
    alone["loss"].backward()  # a batch without an image has a graph
    model.zero_grad()
    with pytest.raises(wt.InputError, match="none of this task's"):
        model.read({"other": "x.wav"})


def test_logit_scale_is_clamped_and_keeps_its_gradient(make_clip, collate, emoji_rows):
    model = make_clip()
    with torch.no_grad():
        model.logit_scale.fill_(9.0)
    batch = collate(model, [{"image": r["image"], "text": r["text"][0]} for r in emoji_rows[:4]])
    out = model.loss(batch)
    assert float(out["scale"]) == pytest.approx(100.0)
    out["loss"].backward()
    assert float(model.logit_scale.grad) != 0.0


def test_rows_with_an_equal_caption_are_not_negatives(make_clip, collate, emoji_rows):
    """Two rows with one caption are not negatives of each other; `same=[]` equals open_clip's loss."""
    model, plain = make_clip().eval(), make_clip(same=[]).eval()
    plain.load_state_dict(model.state_dict())
    rows = [{"image": r["image"], "text": r["text"][0]} for r in emoji_rows[:5]]
    rows[3]["text"] = rows[0]["text"]
    batch = collate(model, rows)
    a, b = (model(batch)[k] for k in ("image", "text"))
    logits = model.logit_scale.exp() * a @ b.T
    target = torch.arange(5)
    plain_loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    assert abs(float((plain.loss(collate(plain, rows))["loss"] - plain_loss).detach())) < 1e-4
    logits[0, 3] = logits[3, 0] = -torch.inf
    want = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    assert abs(float((model.loss(batch)["loss"] - want).detach())) < 1e-4
    assert abs(float((want - plain_loss).detach())) > 1e-3


def test_label_smoothing_equals_cross_entropy(make_clip, collate, emoji_rows):
    """Equals torch's label smoothing, over the remaining candidates where rows share a caption."""
    model = make_clip(label_smoothing=0.2).eval()
    rows = [{"image": r["image"], "text": r["text"][0]} for r in emoji_rows[:6]]
    batch = collate(model, rows)
    a, b = (model(batch)[k] for k in ("image", "text"))
    logits, target = model.logit_scale.exp() * a @ b.T, torch.arange(6)
    each = (F.cross_entropy(x, target, label_smoothing=0.2) for x in (logits, logits.T))
    assert abs(float((model.loss(batch)["loss"] - sum(each) / 2).detach())) < 1e-4
    rows[3]["text"] = rows[0]["text"]
    batch = collate(model, [*rows, {"text": "alone"}])
    a, b = (model(batch)[k] for k in ("image", "text"))
    logits, total = model.logit_scale.exp() * a @ b[:6].T, 0.0
    for i in range(6):
        kept = [j for j in range(6) if j == i or {i, j} != {0, 3}]
        for x in (logits[i, kept], logits[kept, i]):
            total += F.cross_entropy(x, torch.tensor(kept.index(i)), label_smoothing=0.2) / 12
    loss = model.loss(batch)["loss"]
    assert abs(float((loss - total).detach())) < 1e-4
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    for wrong in ({"label_smoothing": 1.0}, {"label_smoothing": 0.1, "loss": "siglip"}):
        with pytest.raises(ValueError, match="0 <= label_smoothing < 1 with 'clip'"):
            make_clip(**wrong)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_false_negatives_by_a_column_without_a_tokenizer(kind, make_clip, collate, emoji_rows):
    """Images of one object with different captions: `same=["object"]`; a batch of one object alone has no negatives,
    and a finite loss."""
    torch.manual_seed(0)
    model = make_clip(loss=kind, same=["object"]).eval()
    rows = [
        {"image": r["image"], "text": r["text"][0], "object": f"o{i // 2}"}
        for i, r in enumerate(emoji_rows[:6])
    ]
    batch = collate(model, rows)
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
    one = model.loss(collate(model, rows[:2]))["loss"]
    assert one.isfinite()
    one.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_loss_covers_the_named_pairs(collate, make_trimodal_clip, trimodal_rows):
    rows = trimodal_rows(5)
    all_pairs, two = (
        make_trimodal_clip().eval(),
        make_trimodal_clip(pairs=[["image", "text"], ["audio", "image"]]).eval(),
    )
    total = all_pairs.loss(collate(all_pairs, rows))
    out = two.loss(collate(two, rows))
    assert set(out) == {"loss", "scale", "image-text", "audio-image"}
    mean = (total["image-text"] + total["image-audio"]) / 2
    assert float(out["loss"].detach()) == pytest.approx(float(mean), abs=1e-5)
    assert "text_to_audio/R@10" in two.evaluate(rows)  # evaluation covers all pairs
    for wrong in ([], [["image", "image"]], [["image", "video"]], [["image", "text"], ["text", "image"]]):
        with pytest.raises(ValueError, match="expected different pairs"):
            make_trimodal_clip(pairs=wrong)


def test_rows_may_lack_different_columns(collate, make_trimodal_clip, trimodal_rows):
    """Each pair's loss is that of the rows that have both columns."""
    rows = trimodal_rows(7)
    del rows[0]["image"], rows[1]["text"], rows[2]["audio"], rows[3]["audio"], rows[3]["text"]
    model = make_trimodal_clip().eval()
    out = model.loss(collate(model, rows))
    losses = []
    for a, b in (("image", "text"), ("image", "audio"), ("text", "audio")):
        both = [{a: r[a], b: r[b]} for r in rows if a in r and b in r]
        losses.append(model.loss(collate(model, both))["loss"].detach())
        assert float(out[f"{a}-{b}"]) == pytest.approx(float(losses[-1]), abs=1e-5)
    assert float(out["loss"].detach()) == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)


@pytest.mark.parametrize("column", ["image", "text", "audio"])
def test_a_batch_without_one_modality_trains(column, collate, make_trimodal_clip, trimodal_rows):
    rows = trimodal_rows(4)
    for row in rows:
        del row[column]
    model = make_trimodal_clip()
    out = model.loss(collate(model, rows))
    others = [k for k in ("image", "text", "audio") if k != column]
    assert f"{others[0]}-{others[1]}" in out and len(out) == 3
    out["loss"].backward()
    assert all(p.grad.abs().max() > 0 for p in model.trunk.parameters() if p.ndim > 1)
    assert all(p.grad is None for p in model.tokenizers[column].parameters())
