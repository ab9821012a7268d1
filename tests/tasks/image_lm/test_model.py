"""ImageLM: the sequence and its loss by hand, dropped captions, sampling, evaluation, saving."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import worldtokens as wt
from worldtokens.layout import modality_id
from worldtokens.tasks.language.decoding import Sampling
from worldtokens.tasks.seq2seq.context import concat_tokens

DIM = 32
VOCABULARY = wt.TextTokenizer.train(
    ["red heart", "blue square", "a face with a grin", "flag of the moon"] * 4, vocab_size=300, dim=1
).backend


def make_model(trunk=None, causal=True, seed=0, **options):
    """A small model with randomised parameters, in eval mode; 16 codes per image, a codebook of 25."""
    torch.manual_seed(seed)
    text = wt.TextTokenizer(VOCABULARY, DIM, context=24, causal=causal, end="<|endoftext|>")
    image = wt.DiscreteTokenizer(DIM, size=16, factor=4, width=16, depth=1, quantizer=wt.FSQ((5, 5)))
    trunk = trunk or wt.Transformer(DIM, 2, 2, rope=3)
    model = wt.ImageLM(text, image, trunk, **options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.15)
    return model.eval()


def make_image(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8))


ROWS = [
    {"image": make_image(0), "text": "red heart"},
    {"image": make_image(1), "text": "a face with a grin and more words"},
    {"image": make_image(2), "text": "flag"},
]
TEXTS = ["red heart", None, "a face with a grin and more words", ""]


def collate(model, rows=ROWS):
    return model.collate([model.read(r) for r in rows])


# ---- the sequence --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_logits_equal_those_of_the_plain_sequence(causal):
    """Row by row: caption, start, codes; each code is predicted from the token before it. Max abs difference 1e-5."""
    model = make_model(causal=causal)
    whole = model(collate(model))
    assert whole.shape == (3, 16, 25)
    for row, got in zip(ROWS, whole, strict=True):
        words = model.text.tokens([row["text"]])
        codes = model.image.tokens([row["image"]])
        x = model.trunk(wt.Tokens.cat(words, codes, sequential=True), mode="dense").x[0]
        want = model.head(x[words.shape[1] : words.shape[1] + 16])
        assert (got - want).abs().max() < 1e-5
        assert (got - model(collate(model, [row]))[0]).abs().max() < 1e-5


def test_a_sequence_has_no_inner_padding_and_is_causal():
    """Captions of different length leave no padding inside the sequence, so the trunk needs no mask."""
    model, batch = make_model(), collate(make_model())
    words, codes = model.text(batch["text"]), model.image(batch["image"])
    joined = concat_tokens([words, codes], sequential=True)
    assert joined.layout.order == "causal"
    assert [sum(n) for n in joined.layout.lengths] == [n + 17 for (n,) in words.layout.lengths]
    assert (joined.pos[:, :, 0][joined.valid].int() == joined.block[joined.valid]).all()
    padded = wt.Tokens.cat(words, codes, sequential=True)
    a, b = model.trunk(joined), model.trunk(padded, mode="dense")
    assert (a.x[a.valid] - b.x[b.valid]).abs().max() < 1e-5


def test_a_code_does_not_change_earlier_outputs():
    model = make_model()
    ids = torch.randint(25, (1, 16), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 9] = (ids[0, 9] + 1) % 25
    prefix = model.prefix(collate(model, ROWS[:1]))
    a, b = (model.hidden(prefix, i)[1][0] for i in (ids, other))
    assert torch.equal(a[:10], b[:10]) and not torch.allclose(a[10:], b[10:], atol=1e-3)


def test_loss_by_hand_and_the_weight_of_text():
    model, batch = make_model(condition_dropout=0.0), collate(make_model())
    ids = model.image.encode(batch["image"]).flatten(1)
    codes = F.cross_entropy(model(batch).flatten(0, 1), ids.flatten())
    assert model.loss(batch)["loss"].item() == pytest.approx(codes.item(), rel=1e-5)
    model.text_weight = 0.5
    got, text_loss = model.loss(batch), 0.0
    for row in ROWS:
        text = model.text.tokens([row["text"]])
        logits = model.trunk(text).x[0, :-1] @ model.text.embedding.weight.T
        text_loss += F.cross_entropy(logits, text.ids[0, 1:], reduction="sum")
    want = codes + 0.5 * text_loss / ids.numel()
    assert got["loss"].item() == pytest.approx(want.item(), rel=1e-5)
    assert float(got["code_loss"]) == pytest.approx(float(codes), rel=1e-5)


def test_gradients_reach_every_parameter_but_the_codec():
    model = make_model(condition_dropout=0.5, text_weight=0.1).train()
    torch.manual_seed(1)  # some rows keep their caption, others drop it
    model.loss(collate(model))["loss"].backward()
    missing = [
        n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    assert missing == [] and not any(p.requires_grad for p in model.image.codec.parameters())


# ---- missing and dropped captions ----------------------------------------------------------------------------


def test_a_row_without_caption_begins_with_the_null_embedding_and_trains_it():
    model = make_model(condition_dropout=0.0)
    batch = collate(model, [ROWS[0], {"image": make_image(1)}, {"image": make_image(2), "text": ""}])
    assert batch["captioned"][:2] == (True, False)
    prefix = model.prefix(batch)
    (n,), (k,) = prefix.layout.lengths[:2]
    assert n == len(model.text.read("red heart")) and k == 1
    assert torch.equal(prefix.x[1, 0], model.null[0, 0])
    model.loss(batch)["loss"].backward()
    assert model.null.grad.any()
    model.zero_grad()
    model.loss(collate(model, ROWS))["loss"].backward()
    assert model.null.grad is None or not model.null.grad.any()


def test_dropped_captions_are_unconditional():
    model, batch = make_model(), collate(make_model())
    ids = model.image.encode(batch["image"]).flatten(1)
    dropped = model.hidden(model.prefix(batch, [True] * 3), ids)[1]
    without = collate(model, [{"image": r["image"]} for r in ROWS])
    conditional = model.hidden(model.prefix(batch), ids)[1]
    assert (dropped - model.hidden(model.prefix(without), ids)[1]).abs().max() < 1e-5
    assert (dropped - conditional).abs().amax((1, 2)).min() > 1e-2
    # the text of a dropped caption has no influence
    other = collate(model, [r | {"text": "blue square"} for r in ROWS])
    assert (dropped - model.hidden(model.prefix(other, [True] * 3), ids)[1]).abs().max() < 1e-5


def test_rows_without_an_image_are_skipped():
    model = make_model(condition_dropout=0.0).train()
    batch = collate(model, [ROWS[0], {"text": "flag"}, ROWS[2]])
    assert batch["weight"] == 2
    want = model.loss(collate(model, [ROWS[0], ROWS[2]]))["loss"]
    assert torch.equal(model.loss(batch)["loss"], want)
    empty = collate(model, [{"text": "flag"}])
    loss = model.loss(empty)["loss"]
    loss.backward()
    assert empty["weight"] == 0 and float(loss) == 0
    with pytest.raises(wt.InputError, match="no row"):
        model.evaluate([{"text": "flag"}])


# ---- sampling ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [0.0, 1.0, 2.5])
def test_samples_do_not_depend_on_the_batch(guidance):
    model = make_model()
    whole = model.sample(TEXTS, guidance=guidance, seed=[5, 6, 7, 8])
    assert whole.shape == (4, 3, 16, 16) and whole.dtype == torch.uint8
    for i, text in enumerate(TEXTS):
        assert torch.equal(model.sample([text], guidance=guidance, seed=5 + i), whole[i : i + 1])
    assert torch.equal(model.sample(TEXTS, guidance=guidance, seed=5, batch_size=3), whole)
    assert len({tuple(p.flatten().tolist()) for p in whole}) == 4


def uncached(model, texts, guidance=1.0):
    """Greedy codes from full sequences, without a cache."""
    rows = [{"text": t} if t is not None else {} for t in texts]
    captions = model._collate_captions([model.read(r) if r else {} for r in rows])
    ids = torch.zeros(len(texts), 0, dtype=torch.int64)
    for i in range(16):
        padded = F.pad(ids, (0, 16 - i))  # codes after index i do not matter
        conditional, null = (
            model.head(model.hidden(model.prefix(captions, [d] * len(texts)), padded)[1][:, i])
            for d in (False, True)
        )
        ids = torch.cat([ids, (null + guidance * (conditional - null)).argmax(-1, keepdim=True)], 1)
    return model.image.decode(ids, torch.uint8)


# a recurrent trunk is causal
@pytest.mark.parametrize(("trunk", "causal"), [("transformer", True), ("transformer", False), ("lstm", True)])
def test_cached_sampling_equals_uncached_sampling(trunk, causal):
    model = make_model(trunk=wt.Recurrent("lstm", DIM, 1) if trunk == "lstm" else None, causal=causal)
    with torch.no_grad():
        for guidance in (1.0, 3.0):
            want = uncached(model, TEXTS, guidance)
            assert torch.equal(model.sample(TEXTS, temperature=0, guidance=guidance), want)


def test_guidance_one_is_conditional_and_zero_is_unconditional():
    model = make_model()
    unconditional = model.sample(2, seed=3)
    assert torch.equal(model.sample(["red heart", "flag"], guidance=0.0, seed=3), unconditional)
    assert torch.equal(model.sample([None, None], guidance=7.0, seed=3), unconditional)
    model.prefix = lambda batch, dropped, own=model.prefix: own(batch, calls.append(list(dropped)) or dropped)
    calls = []
    conditional = model.sample(["red heart", "flag"], guidance=1.0, seed=3)
    assert calls == [[False, False]]  # one pass with each caption, none with the null embedding
    assert not torch.equal(model.sample(["red heart", "flag"], guidance=4.0, seed=3), conditional)
    assert calls[1] == [False, False, True, True]


def test_samples_follow_the_distribution():
    """The first code of 2,000 samples: frequencies within 4 standard errors of the probabilities."""
    model, n = make_model(), 2000
    one = wt.Tokens.cat(
        model.text.tokens(["red heart"]),
        model.image.embed_ids(torch.zeros(1, 16, dtype=torch.int64)),
        sequential=True,
    )
    with torch.no_grad():
        p = model.head(model.trunk(one).x[0, len(model.text.read("red heart"))]).softmax(-1)
    rows = [model.read({"text": "red heart"})] * n
    first = model._sample_codes(rows, Sampling(temperature=1.0, seed=list(range(n))), 1.0)[:, 0]
    share = torch.bincount(first, minlength=25) / n
    assert ((share - p).abs() < 4 * (p * (1 - p) / n).sqrt() + 1e-9).all() and p.max() < 0.9


def test_text_that_spells_a_code_or_control_token_stays_text():
    """Text and codes share no ids: text tokens come from the text tokenizer only, sampled ids are codes."""
    model = make_model()
    texts = ["<|endoftext|>", "<|startoftext|> 7 7 7", "<image>", "<|code_3|>", "3"]
    prefix = model.prefix(model._collate_captions([model.read({"text": t}) for t in texts]))
    assert (prefix.modality == modality_id("text")).all()
    assert [int((row == model.text.end_id).sum()) for row in prefix.ids.where(prefix.valid, -1)] == [1] * 5
    for t in texts:
        assert model.text.decode(model.text.read(t)) == t
    # even with extreme logits only codes of the codebook are sampled
    with torch.no_grad():
        model.head.bias.copy_(torch.linspace(-50, 50, 25))
    ids = model._sample_codes(
        [model.read({"text": t}) for t in texts], Sampling(temperature=2.0, seed=0), 3.0
    )
    assert ids.shape == (5, 16) and int(ids.min()) >= 0 and int(ids.max()) < model.image.codebook_size
    assert model.head.weight.shape[0] == model.image.start_id  # the start token is never sampled


def test_invalid_requests_raise():
    model = make_model().train()
    assert model.sample([], seed=0).shape == (0, 3, 16, 16) and model.training
    with pytest.raises(wt.InputError, match="seeds"):
        model.sample(["flag"], seed=[1, 2])
    with pytest.raises(wt.InputError, match="top_k"):
        model.sample(["flag"], top_k=0)
    with pytest.raises(wt.InputError):
        model.sample([3])
    assert model.training


# ---- saving, evaluation, settings ----------------------------------------------------------------------------


def test_save_and_load(tmp_path):
    model = make_model(condition_dropout=0.25, text_weight=0.5)
    model.save(tmp_path)
    again = wt.load(tmp_path)
    assert (again.condition_dropout, again.text_weight, again.image.frozen) == (0.25, 0.5, True)
    assert torch.equal(again.null, model.null)
    assert torch.equal(again.sample(TEXTS, seed=4), model.sample(TEXTS, seed=4))


def test_evaluation_by_hand_and_independent_of_the_batch():
    model = make_model().train()
    a, b = model.evaluate(ROWS, batch_size=3), model.evaluate(ROWS, batch_size=2)
    assert set(a) == {"bits_per_code", "bits_null", "bits_shuffled"} and model.training
    assert all(a[k] == pytest.approx(b[k], rel=1e-5) for k in a)
    model.eval()

    def bits(rows):
        ids = model.image.encode(collate(model)["image"]).flatten()
        return float(F.cross_entropy(model(collate(model, rows)).flatten(0, 1), ids)) / math.log(2)

    shuffled = [r | {"text": s["text"]} for r, s in zip(ROWS, ROWS[1:] + ROWS[:1], strict=True)]
    assert a["bits_per_code"] == pytest.approx(bits(ROWS), rel=1e-5)
    assert a["bits_null"] == pytest.approx(bits([{"image": r["image"]} for r in ROWS]), rel=1e-5)
    assert a["bits_shuffled"] == pytest.approx(bits(shuffled), rel=1e-5)


def test_mismatched_settings_raise():
    text = wt.TextTokenizer(VOCABULARY, DIM, end="<|endoftext|>")
    codes = wt.DiscreteTokenizer(DIM, size=16, factor=4, width=16, depth=1)
    with pytest.raises(ValueError, match="one width"):
        wt.ImageLM(text, codes, wt.Transformer(DIM * 2, 1, 2))
    with pytest.raises(ValueError, match="causal=True"):
        bare = wt.DiscreteTokenizer(DIM, size=16, factor=4, width=16, depth=1, causal=False)
        wt.ImageLM(text, bare, wt.Transformer(DIM, 1, 2))
    with pytest.raises(ValueError, match="text_weight"):
        bidirectional = wt.TextTokenizer(VOCABULARY, DIM, causal=False, end="<|endoftext|>")
        wt.ImageLM(bidirectional, codes, wt.Transformer(DIM, 1, 2), text_weight=1.0)


def test_two_images_are_memorised_by_their_captions():
    """Trained on two images only, the model generates the one in the caption."""
    torch.manual_seed(0)
    model = make_model(trunk=wt.Transformer(DIM, 2, 2), condition_dropout=0.2).train()
    pair = [{"image": make_image(0), "text": "red heart"}, {"image": make_image(1), "text": "blue square"}]
    batch = collate(model, pair * 4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(batch)["loss"].backward()
        optimizer.step()
    real = model.image.decode(model.image.encode(batch["image"])[:2], torch.uint8)
    assert not torch.equal(real[0], real[1])
    sampled = model.sample([r["text"] for r in pair], temperature=0, guidance=1.0)
    assert torch.equal(sampled, real)
    # without a caption it samples either one, never a mixture
    unconditional = model.sample(24, top_p=0.95)
    matches = [[torch.equal(p, r) for r in real] for p in unconditional]
    assert all(any(m) for m in matches) and {m.index(True) for m in matches} == {0, 1}
