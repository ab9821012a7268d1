"""Translator with three kinds of trunks: a fixed vector, additive attention, Transformers."""

import itertools
import random

import pytest
import torch
from torch import nn

import worldtokens as wt
from worldtokens.errors import InputError

DIM = 32


def tokens(lengths, seed=0, dim=DIM, order="causal"):
    def one(n, i):
        g = torch.Generator().manual_seed(100 * seed + i)
        t = wt.Tokens(torch.randn(1, n, dim, generator=g), layout=wt.Layout.simple([n], order))
        return t.causal() if order == "causal" else t

    return wt.Tokens.stack([one(n, i) for i, n in enumerate(lengths)])


def perturbed(trunk):
    """Weights and biases away from their initial values."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in trunk.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=g))
    return trunk.eval()


def decoders():
    torch.manual_seed(0)
    trunks = {
        "gru": wt.Recurrent("gru", DIM, 2, cross=True, context_dim=24),
        "lstm": wt.Recurrent("lstm", DIM, 2, cross=True, context_dim=24),
        "additive": wt.AdditiveDecoder(DIM, context_dim=24, attention_dim=16),
    }
    return {name: perturbed(trunk) for name, trunk in trunks.items()}


# ---- the recurrent decoders ----------------------------------------------------------------------------------


def test_additive_attention_equals_the_paper():
    """Token by token with torch's GRUCell, by equations 5 and 6 and the appendix of Bahdanau et al.: below 1e-5."""
    trunk = decoders()["additive"]
    cell = nn.GRUCell(DIM + 24, DIM)
    cell.weight_ih.data = torch.cat([trunk.input_gates.weight, trunk.context_gates.weight], 1).data
    cell.weight_hh.data = trunk.hidden_gates.weight.data
    cell.bias_ih.data, cell.bias_hh.data = trunk.input_gates.bias.data, trunk.hidden_gates.bias.data
    y, h = tokens([4]), tokens([6], 1, 24, "bidirectional")
    with wt.attention_maps(trunk) as maps, torch.no_grad():
        out = trunk(y, context=h)
    with torch.no_grad():
        s = torch.tanh(trunk.initial(torch.cat([h.x[0, 0], h.x[0, -1]])))[None]
        for i in range(4):
            e = torch.stack(
                [trunk.score(torch.tanh(trunk.query(s[0]) + trunk.key(h.x[0, j]))) for j in range(6)]
            )
            alpha = e[:, 0].softmax(0)
            c = (alpha[:, None] * h.x[0]).sum(0)
            s = cell(torch.cat([y.x[0, i], c])[None], s)
            t = trunk.out(torch.cat([s[0], c, y.x[0, i]]))
            x = torch.stack([torch.maximum(t[2 * k], t[2 * k + 1]) for k in range(DIM)])
            assert (out.x[0, i] - x).abs().max() < 1e-5
            assert (maps.cross[-1][0, 0, i] - alpha).abs().max() < 1e-6


def test_the_fixed_vector_is_the_whole_context():
    """The recurrent decoder depends on the first and last context token only."""
    for name in ("gru", "lstm"):
        trunk, y, h = decoders()[name], tokens([5, 3]), tokens([6, 4], 1, 24)
        changed = h.replace(x=h.x.clone(), layout=h.layout)
        changed.x[:, 1:3] += 9.0
        assert torch.equal(trunk(y, context=h).x, trunk(y, context=changed).x)
        changed.x[0, 5] += 1.0
        moved = (trunk(y, context=changed).x - trunk(y, context=h).x).abs().amax(-1)
        assert (moved[0] > 1e-3).all() and (moved[1] == 0).all()


@pytest.mark.parametrize("name", ["gru", "lstm", "additive"])
def test_batching_padding_and_caching_change_nothing(name):
    trunk, lengths, sizes = decoders()[name], (5, 0, 2, 5), (3, 4, 6, 1)
    y, h = tokens(lengths), tokens(sizes, 1, 24)
    out = trunk(y, context=h).x
    for row, (n, k) in enumerate(zip(lengths, sizes, strict=True)):
        alone = trunk(tokens(lengths)[row], context=tokens(sizes, 1, 24)[row]).x
        assert (out[row] - alone[0]).abs().max() < 1e-5
        assert (out[row, n:] == 0).all()
        short = trunk(y.replace(layout=y.layout)[row], context=wt.Tokens(h.x[row : row + 1, :k])).x
        assert (out[row] - short[0]).abs().max() < 1e-5
    poisoned = h.replace(x=h.x.masked_fill(~h.valid[..., None], float("nan")), layout=h.layout)
    nan_padded = y.replace(x=y.x.masked_fill(~y.valid[..., None], float("nan")), layout=y.layout)
    assert torch.equal(trunk(nan_padded, context=poisoned).x, out)
    # step by step, then with selected rows
    rows = [3, 0]
    whole, source = tokens([5, 5, 5, 5], 7), tokens(sizes, 1, 24)
    cache = trunk.cache(4)
    parts = [trunk(positions_of(whole, 0, 2), context=source, cache=cache)]
    for i in (2, 3):
        parts.append(trunk(cache.offset(positions_of(whole, i, i + 1)), cache=cache))
    cache.select(rows)
    parts = [p.x[rows] for p in parts]
    parts.append(trunk(cache.offset(positions_of(whole[rows], 4, 5)), cache=cache).x)
    full = trunk(whole, context=source).x[rows]
    assert (torch.cat(parts, 1) - full).abs().max() < 1e-5


def positions_of(t, a, b):
    """Positions a to b of rows without padding, numbered from 0."""
    layout = wt.Layout.simple([b - a] * len(t), "causal")
    return wt.Tokens(t.x[:, a:b], layout=layout).causal()


@pytest.mark.parametrize("name", ["gru", "additive"])
def test_a_row_without_context_is_finite_and_all_parameters_get_gradients(name):
    trunk = decoders()[name].train()
    out = trunk(tokens([3, 3]), context=tokens([4, 0], 1, 24))
    assert out.x.isfinite().all()
    out.x.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trunk.parameters())
    assert all(p.grad.abs().sum() > 0 for p in trunk.parameters())


def test_contexts_that_do_not_match_raise():
    trunks = decoders()
    for name in ("gru", "additive"):
        with pytest.raises(ValueError, match="got none"):
            trunks[name](tokens([3]))
        with pytest.raises(ValueError, match="1 rows of dim 8, expected 1 rows of dim 24"):
            trunks[name](tokens([3]), context=tokens([3], 1, 8))
        with pytest.raises(ValueError, match="one sample per row"):
            trunks[name](tokens([3]), context=tokens([3, 2], 1, 24).pack(8))
    with pytest.raises(ValueError, match="takes no context"):
        wt.Recurrent("gru", DIM)(tokens([2]), context=tokens([2]))
    with pytest.raises(ValueError, match="bidirectional=False"):
        wt.Recurrent("gru", DIM, cross=True, bidirectional=True)


# ---- translation ----------------------------------------------------------------------------------------------

DIGITS = {"one": "uno", "two": "dos", "three": "tres", "four": "cuatro", "five": "cinco", "six": "seis"}
NOUNS = {"cat": "gato", "dog": "perro", "book": "libro", "tree": "monte"}
COLOURS = {"red": "rojo", "black": "negro", "white": "blanco"}


def pairs(side):
    """All sentences of a small language with adjectives before the noun, and of one with adjectives after it; three in four
    are training data."""
    rows = []
    for (d, numero), (c, color), (t, cosa) in itertools.product(
        *(w.items() for w in (DIGITS, COLOURS, NOUNS))
    ):
        rows.append({"text": f"{d} {c} {t}", "target": f"{numero} {cosa} {color}"})
    rows += [{"text": f"{d} {t}", "target": f"{DIGITS[d]} {NOUNS[t]}"} for d in DIGITS for t in NOUNS]
    random.Random(0).shuffle(rows)
    return rows[24:] if side == "train" else rows[:24]


def translator(kind, dim=48):
    torch.manual_seed(0)
    rows = pairs("train")
    tokenizers = {
        name: wt.TextTokenizer.train([r[name] for r in rows], vocab_size=330, dim=dim, context=20)
        for name in ("text", "target")
    }
    trunks = {
        "fixed": lambda: (wt.Recurrent("gru", dim), wt.Recurrent("gru", dim, cross=True)),
        "additive": lambda: (
            wt.Recurrent("gru", dim, bidirectional=True, first_norm=True),
            wt.AdditiveDecoder(dim, first_norm=True),
        ),
        "transformer": lambda: (wt.Transformer(dim, 1, 2), wt.Transformer(dim, 1, 2, cross=True)),
    }
    if kind != "fixed":
        tokenizers["text"] = wt.TextTokenizer(
            tokenizers["text"].backend, dim, 20, causal=False, end="<|endoftext|>", pad="<|endoftext|>"
        )
    encoder, decoder = trunks[kind]()
    return wt.Translator(tokenizers, decoder=decoder, encoder=encoder, score="bleu", max_new_tokens=12)


@pytest.mark.parametrize("kind", ["fixed", "additive", "transformer"])
def test_a_batch_equals_its_rows_and_saving_keeps_translations(kind, tmp_path):
    model = translator(kind).eval()
    rows = pairs("train")[:6]
    losses = [model.token_losses(model.collate([model.read(r)])) for r in rows]
    total, count = model.token_losses(model.collate([model.read(r) for r in rows]))
    assert int(count) == sum(int(c) for _, c in losses)
    assert float(total.detach()) == pytest.approx(sum(float(t.detach()) for t, _ in losses), rel=1e-5)
    texts = [r["text"] for r in rows]
    for beams in (1, 3):
        whole = model.translate(texts, beams=beams)
        assert whole == [model.translate(t, beams=beams)[0] for t in texts]
    model.save(tmp_path)
    assert wt.load(tmp_path).translate(texts, beams=3) == whole
    zero = model.loss(model.collate([model.read({"text": "one red cat"})]))["loss"]
    assert float(zero.detach()) == 0.0 and zero.requires_grad


@pytest.mark.parametrize("kind", ["additive", "transformer"])
def test_held_out_sentences_are_translated_and_aligned(kind, tmp_path):
    """After seconds of training, held-out sentences are translated correctly, and each target word attends most to its own
    source word, although adjective and noun change places."""
    model = translator(kind)
    settings = wt.TrainSettings(out=str(tmp_path), steps=100, batch_size=32, tensorboard=False)
    wt.train(model, pairs("train"), train=settings, optim=wt.OptimSettings(lr=1e-2))
    test = pairs("test")
    assert model.evaluate(test)["exact"] >= 0.9
    dictionary = {**DIGITS, **NOUNS, **COLOURS}
    hits = total = 0
    for r in test[:10]:
        found = model.align(r["text"], r["target"])
        assert found.weights.sum(1).allclose(torch.ones(len(found.target)), atol=1e-4)
        source = [p.strip() for p in found.source]
        for token, weights in zip(found.target[:-1], found.weights, strict=False):
            total += 1
            hits += dictionary.get(source[int(weights[: len(source)].argmax())]) == token.strip()
    if kind == "additive":
        assert hits / total > 0.7


def test_the_alignment_is_drawn(tmp_path):
    from PIL import Image

    from worldtokens.figures.attention import alignment_figure

    path = alignment_figure(translator("additive"), ["one red cat", "two dogs"], tmp_path / "alignment.png")
    assert Image.open(path).size[0] > 100


def test_ibm_model_1_finds_the_dictionary():
    """IBM model 1 on sentence pairs whose words have one counterpart each, in another order."""
    from worldtokens.evals.seq2seq.translate_verses import Dictionary, by_length

    rows = pairs("train")
    found = Dictionary([(r["text"], r["target"]) for r in rows])
    assert {w: found.best[w] for w in (*DIGITS, *NOUNS, *COLOURS)} == {**DIGITS, **NOUNS, **COLOURS}
    assert found.translate("One red unicorn, two") == "Uno rojo unicorn, dos"
    said = ["a b c d"] * 10 + ["x " * 12] * 10
    curve = by_length(said, said[:10] + ["y " * 12] * 10, [[t] for t in said])
    assert curve["0-9"] == pytest.approx(100) and curve["10-14"] < 5


def test_a_model_without_cross_attention_has_no_alignment():
    with pytest.raises(InputError, match="has no cross-attention"):
        translator("fixed").align("one red cat")
    with pytest.raises(ValueError, match="expected the target column 'target'"):
        wt.Translator({"text": translator("fixed").front}, decoder=wt.Recurrent("gru", 48, cross=True))
