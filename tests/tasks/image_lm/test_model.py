"""Drawing by a language model: the sequence and its loss by hand, captions that are lost, and sampling one by one."""

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


def made(trunk=None, causal=True, seed=0, **options):
    """A small model with every parameter away from its start, in eval mode; its 16 codes are of a book of 25."""
    torch.manual_seed(seed)
    text = wt.TextTokenizer(VOCABULARY, DIM, context=24, causal=causal, end="<|endoftext|>")
    picture = wt.DiscreteTokenizer(DIM, size=16, factor=4, width=16, depth=1, quantizer=wt.FSQ((5, 5)))
    trunk = trunk or wt.Transformer(DIM, 2, 2, rope=3)
    model = wt.ImageLM(text, picture, trunk, **options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.15)
    return model.eval()


def picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8))


ROWS = [
    {"image": picture(0), "text": "red heart"},
    {"image": picture(1), "text": "a face with a grin and more words"},
    {"image": picture(2), "text": "flag"},
]
TEXTS = ["red heart", None, "a face with a grin and more words", ""]


def batch_of(model, rows=ROWS):
    return model.collate([model.read(r) for r in rows])


# ---- the sequence --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_logits_are_those_of_the_plain_sequence(causal):
    """Row by row: caption, start, codes; each code is read off the token before it. Max abs difference 1e-5."""
    model = made(causal=causal)
    whole = model(batch_of(model))
    assert whole.shape == (3, 16, 25)
    for row, got in zip(ROWS, whole, strict=True):
        words = model.text.tokens([row["text"]])
        codes = model.image.tokens([row["image"]])
        x = model.trunk(wt.Tokens.cat(words, codes, sequential=True), mode="dense").x[0]
        want = model.head(x[words.shape[1] : words.shape[1] + 16])
        assert (got - want).abs().max() < 1e-5
        assert (got - model(batch_of(model, [row]))[0]).abs().max() < 1e-5


def test_a_sequence_without_gaps_is_read_causally():
    """Captions of different length leave no padding inside, and the trunk needs no mask."""
    model, batch = made(), batch_of(made())
    words, codes = model.text(batch["text"]), model.image(batch["image"])
    joined = concat_tokens([words, codes], sequential=True)
    assert joined.layout.order == "causal"
    assert [sum(n) for n in joined.layout.lengths] == [n + 17 for (n,) in words.layout.lengths]
    assert (joined.pos[:, :, 0][joined.valid].int() == joined.block[joined.valid]).all()
    loose = wt.Tokens.cat(words, codes, sequential=True)
    a, b = model.trunk(joined), model.trunk(loose, mode="dense")
    assert (a.x[a.valid] - b.x[b.valid]).abs().max() < 1e-5


def test_a_later_code_changes_nothing_before_it():
    model = made()
    ids = torch.randint(25, (1, 16), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 9] = (ids[0, 9] + 1) % 25
    prefix = model.prefix(batch_of(model, ROWS[:1]))
    a, b = (model.hidden(prefix, i)[1][0] for i in (ids, other))
    assert torch.equal(a[:10], b[:10]) and not torch.allclose(a[10:], b[10:], atol=1e-3)


def test_loss_by_hand_and_the_weight_of_words():
    model, batch = made(condition_dropout=0.0), batch_of(made())
    ids = model.image.encode(batch["image"]).flatten(1)
    codes = F.cross_entropy(model(batch).flatten(0, 1), ids.flatten())
    assert model.loss(batch)["loss"].item() == pytest.approx(codes.item(), rel=1e-5)
    model.text_weight = 0.5
    got, words = model.loss(batch), 0.0
    for row in ROWS:
        text = model.text.tokens([row["text"]])
        logits = model.trunk(text).x[0, :-1] @ model.text.embedding.weight.T
        words += F.cross_entropy(logits, text.ids[0, 1:], reduction="sum")
    want = codes + 0.5 * words / ids.numel()
    assert got["loss"].item() == pytest.approx(want.item(), rel=1e-5)
    assert float(got["codes"]) == pytest.approx(float(codes), rel=1e-5)


def test_gradients_reach_every_parameter_but_the_codec():
    model = made(condition_dropout=0.5, text_weight=0.1).train()
    torch.manual_seed(1)  # some rows keep their words, some lose them
    model.loss(batch_of(model))["loss"].backward()
    lacking = [
        n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    assert lacking == [] and not any(p.requires_grad for p in model.image.codec.parameters())


# ---- captions that are missing or lost -----------------------------------------------------------------------


def test_a_row_without_caption_begins_with_the_null_and_trains_it():
    model = made(condition_dropout=0.0)
    batch = batch_of(model, [ROWS[0], {"image": picture(1)}, {"image": picture(2), "text": ""}])
    assert batch["captioned"][:2] == (True, False)
    prefix = model.prefix(batch)
    (n,), (k,) = prefix.layout.lengths[:2]
    assert n == len(model.text.read("red heart")) and k == 1
    assert torch.equal(prefix.x[1, 0], model.null[0, 0])
    model.loss(batch)["loss"].backward()
    assert model.null.grad.any()
    model.zero_grad()
    model.loss(batch_of(model, ROWS))["loss"].backward()
    assert model.null.grad is None or not model.null.grad.any()


def test_all_dropped_is_unconditional():
    model, batch = made(), batch_of(made())
    ids = model.image.encode(batch["image"]).flatten(1)
    lost = model.hidden(model.prefix(batch, [True] * 3), ids)[1]
    without = batch_of(model, [{"image": r["image"]} for r in ROWS])
    kept = model.hidden(model.prefix(batch), ids)[1]
    assert (lost - model.hidden(model.prefix(without), ids)[1]).abs().max() < 1e-5
    assert (lost - kept).abs().amax((1, 2)).min() > 1e-2
    # what a lost caption said leaves no trace
    other = batch_of(model, [r | {"text": "blue square"} for r in ROWS])
    assert (lost - model.hidden(model.prefix(other, [True] * 3), ids)[1]).abs().max() < 1e-5


def test_rows_without_a_picture_are_left_out():
    model = made(condition_dropout=0.0).train()
    batch = batch_of(model, [ROWS[0], {"text": "flag"}, ROWS[2]])
    assert batch["weight"] == 2
    want = model.loss(batch_of(model, [ROWS[0], ROWS[2]]))["loss"]
    assert torch.equal(model.loss(batch)["loss"], want)
    empty = batch_of(model, [{"text": "flag"}])
    loss = model.loss(empty)["loss"]
    loss.backward()
    assert empty["weight"] == 0 and float(loss) == 0
    with pytest.raises(wt.InputError, match="no row"):
        model.evaluate([{"text": "flag"}])


# ---- sampling ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [0.0, 1.0, 2.5])
def test_sampling_in_a_batch_is_sampling_one_by_one(guidance):
    model = made()
    whole = model.sample(TEXTS, guidance=guidance, seed=[5, 6, 7, 8])
    assert whole.shape == (4, 3, 16, 16) and whole.dtype == torch.uint8
    for i, asked in enumerate(TEXTS):
        assert torch.equal(model.sample([asked], guidance=guidance, seed=5 + i), whole[i : i + 1])
    assert torch.equal(model.sample(TEXTS, guidance=guidance, seed=5, batch_size=3), whole)
    assert len({tuple(p.flatten().tolist()) for p in whole}) == 4


def plain(model, texts, guidance=1.0):
    """The likeliest codes, found with whole sequences and no cache."""
    rows = [{"text": t} if t is not None else {} for t in texts]
    words = model._captions([model.read(r) if r else {} for r in rows])
    ids = torch.zeros(len(texts), 0, dtype=torch.int64)
    for i in range(16):
        padded = F.pad(ids, (0, 16 - i))  # what stands behind place i does not matter
        given, null = (
            model.head(model.hidden(model.prefix(words, [d] * len(texts)), padded)[1][:, i])
            for d in (False, True)
        )
        ids = torch.cat([ids, (null + guidance * (given - null)).argmax(-1, keepdim=True)], 1)
    return model.image.decode(ids, torch.uint8)


# a recurrent trunk reads from left to right alone
@pytest.mark.parametrize(("trunk", "causal"), [("transformer", True), ("transformer", False), ("lstm", True)])
def test_cached_sampling_is_uncached_sampling(trunk, causal):
    model = made(trunk=wt.Recurrent("lstm", DIM, 1) if trunk == "lstm" else None, causal=causal)
    with torch.no_grad():
        for guidance in (1.0, 3.0):
            want = plain(model, TEXTS, guidance)
            assert torch.equal(model.sample(TEXTS, temperature=0, guidance=guidance), want)


def test_guidance_one_is_none_and_zero_is_unconditional():
    model = made()
    free = model.sample(2, seed=3)
    assert torch.equal(model.sample(["red heart", "flag"], guidance=0.0, seed=3), free)
    assert torch.equal(model.sample([None, None], guidance=7.0, seed=3), free)
    model.prefix = lambda batch, dropped, own=model.prefix: own(batch, seen.append(list(dropped)) or dropped)
    seen = []
    plainly = model.sample(["red heart", "flag"], guidance=1.0, seed=3)
    assert seen == [[False, False]]  # one reading of each caption, and no null
    assert not torch.equal(model.sample(["red heart", "flag"], guidance=4.0, seed=3), plainly)
    assert seen[1] == [False, False, True, True]


def test_draws_follow_the_distribution():
    """The first code of 2,000 draws: frequencies within 4 standard errors of the probabilities."""
    model, n = made(), 2000
    one = wt.Tokens.cat(
        model.text.tokens(["red heart"]),
        model.image.embedded(torch.zeros(1, 16, dtype=torch.int64)),
        sequential=True,
    )
    with torch.no_grad():
        p = model.head(model.trunk(one).x[0, len(model.text.read("red heart"))]).softmax(-1)
    rows = [model.read({"text": "red heart"})] * n
    first = model._draw(rows, Sampling(temperature=1.0, seed=list(range(n))), 1.0)[:, 0]
    share = torch.bincount(first, minlength=25) / n
    assert ((share - p).abs() < 4 * (p * (1 - p) / n).sqrt() + 1e-9).all() and p.max() < 0.9


def test_text_that_spells_a_code_or_control_token_stays_text():
    """Words and codes share no id: whatever is typed, tokens of text are text's, and drawn ids are codes."""
    model = made()
    typed = ["<|endoftext|>", "<|startoftext|> 7 7 7", "<image>", "<|code_3|>", "3"]
    prefix = model.prefix(model._captions([model.read({"text": t}) for t in typed]))
    assert (prefix.modality == modality_id("text")).all()
    assert [int((row == model.text.end_id).sum()) for row in prefix.ids.where(prefix.valid, -1)] == [1] * 5
    for t in typed:
        assert model.text.decode(model.text.read(t)) == t
    # even where the head is wild about one id, only codes of the book can come out
    with torch.no_grad():
        model.head.bias.copy_(torch.linspace(-50, 50, 25))
    ids = model._draw([model.read({"text": t}) for t in typed], Sampling(temperature=2.0, seed=0), 3.0)
    assert ids.shape == (5, 16) and int(ids.min()) >= 0 and int(ids.max()) < model.image.codebook_size
    assert model.head.weight.shape[0] == model.image.start_id  # the start token is not to be drawn


def test_what_cannot_be_asked():
    model = made().train()
    assert model.sample([], seed=0).shape == (0, 3, 16, 16) and model.training
    with pytest.raises(wt.InputError, match="seeds"):
        model.sample(["flag"], seed=[1, 2])
    with pytest.raises(wt.InputError, match="top_k"):
        model.sample(["flag"], top_k=0)
    with pytest.raises(wt.InputError):
        model.sample([3])
    assert model.training


# ---- saving, figures, parts ----------------------------------------------------------------------------------


def test_saved_and_loaded_it_draws_the_same(tmp_path):
    model = made(condition_dropout=0.25, text_weight=0.5)
    model.save(tmp_path)
    again = wt.load(tmp_path)
    assert (again.condition_dropout, again.text_weight, again.image.frozen) == (0.25, 0.5, True)
    assert torch.equal(again.null, model.null)
    assert torch.equal(again.sample(TEXTS, seed=4), model.sample(TEXTS, seed=4))


def test_evaluation_by_hand_and_for_any_batch():
    model = made().train()
    a, b = model.evaluate(ROWS, batch_size=3), model.evaluate(ROWS, batch_size=2)
    assert set(a) == {"bits_per_code", "bits_null", "bits_shuffled"} and model.training
    assert all(a[k] == pytest.approx(b[k], rel=1e-5) for k in a)
    model.eval()

    def bits(rows):
        ids = model.image.encode(batch_of(model)["image"]).flatten()
        return float(F.cross_entropy(model(batch_of(model, rows)).flatten(0, 1), ids)) / math.log(2)

    turned = [r | {"text": s["text"]} for r, s in zip(ROWS, ROWS[1:] + ROWS[:1], strict=True)]
    assert a["bits_per_code"] == pytest.approx(bits(ROWS), rel=1e-5)
    assert a["bits_null"] == pytest.approx(bits([{"image": r["image"]} for r in ROWS]), rel=1e-5)
    assert a["bits_shuffled"] == pytest.approx(bits(turned), rel=1e-5)


def test_parts_that_do_not_fit():
    text = wt.TextTokenizer(VOCABULARY, DIM, end="<|endoftext|>")
    codes = wt.DiscreteTokenizer(DIM, size=16, factor=4, width=16, depth=1)
    with pytest.raises(ValueError, match="one width"):
        wt.ImageLM(text, codes, wt.Transformer(DIM * 2, 1, 2))
    with pytest.raises(ValueError, match="causal=True"):
        bare = wt.DiscreteTokenizer(DIM, size=16, factor=4, width=16, depth=1, causal=False)
        wt.ImageLM(text, bare, wt.Transformer(DIM, 1, 2))
    with pytest.raises(ValueError, match="text_weight"):
        together = wt.TextTokenizer(VOCABULARY, DIM, causal=False, end="<|endoftext|>")
        wt.ImageLM(together, codes, wt.Transformer(DIM, 1, 2), text_weight=1.0)


def test_two_pictures_are_learnt_by_their_names():
    """Trained on two images alone, it draws the one that is asked for."""
    torch.manual_seed(0)
    model = made(trunk=wt.Transformer(DIM, 2, 2), condition_dropout=0.2).train()
    pair = [{"image": picture(0), "text": "red heart"}, {"image": picture(1), "text": "blue square"}]
    batch = batch_of(model, pair * 4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(batch)["loss"].backward()
        optimizer.step()
    real = model.image.decode(model.image.encode(batch["image"])[:2], torch.uint8)
    assert not torch.equal(real[0], real[1])
    drawn = model.sample([r["text"] for r in pair], temperature=0, guidance=1.0)
    assert torch.equal(drawn, real)
    # without words it draws now the one, now the other, and never half of each
    free = model.sample(24, top_p=0.95)
    which = [[torch.equal(p, r) for r in real] for p in free]
    assert all(any(w) for w in which) and {w.index(True) for w in which} == {0, 1}
