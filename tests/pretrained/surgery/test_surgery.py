"""Changes to a built model: sizes, vocabularies, contexts, freezing, a trunk under a new front-end.

Each is held against a reference (timm's resampling, FlexiViT's identity) or against what the model gave before.
"""

from __future__ import annotations

import copy
import math

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torch import nn

import worldtokens as wt
from worldtokens.pretrained.surgery.resize import resize_kernel
from worldtokens.testing import randomised
from worldtokens.tokenizers.base import Batch
from worldtokens.training.optim import OptimSettings, groups


def classifier(patch=8, size=(32, 24), **settings) -> wt.Classifier:
    front = wt.ImageTokenizer(24, patch=patch, size=size, class_token=True, registers=2, **settings)
    return randomised(wt.Classifier(front, wt.Transformer(24, 2, 4, drop_path=0.5), 5))


def clip() -> wt.CLIP:
    fronts = {"image": wt.ImageTokenizer(24, patch=8, size=32), "text": words()}
    return randomised(wt.CLIP(fronts, wt.Transformer(24, 1, 4), dim=16))


TEXTS = ["a cat sat on the mat", "the quick brown fox jumps over the lazy dog", "cats and dogs"]


def words(**settings) -> wt.TextTokenizer:
    return wt.TextTokenizer.train(TEXTS * 3, 330, dim=24, context=16, start="<s>", **settings)


def again(model: wt.Part, folder) -> wt.Part:
    return wt.load(model.save(folder))


# ---- images ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "old,new", [((8, 8), (16, 16)), ((16, 16), (8, 8)), ((8, 4), (6, 10)), ((14, 14), (16, 16))]
)
def test_kernels_are_resized_as_timm_does(old, new):
    """Largest difference 1e-4 of values near 1 to 40: timm takes its pseudo-inverse in float32, we in float64."""
    weight = torch.randn(5, 3, *old, generator=torch.Generator().manual_seed(1))
    want, found = resample_patch_embed(weight, list(new)), resize_kernel(weight, new)
    assert found.shape == want.shape
    assert float((found - want).abs().max() / want.abs().max()) < 1e-5


def test_an_enlarged_picture_gives_the_same_tokens():
    """FlexiViT's identity: with patches of twice the size, an image of which each patch was enlarged to twice the size."""
    g = torch.Generator().manual_seed(2)
    weight, patch = torch.randn(5, 3, 8, 8, generator=g), torch.randn(1, 3, 8, 8, generator=g)
    large = nn.functional.interpolate(patch, size=(16, 12), mode="bicubic", antialias=True)
    want = torch.einsum("dchw,bchw->bd", weight, patch)
    found = torch.einsum("dchw,bchw->bd", resize_kernel(weight, (16, 12)), large)
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name,prefix", [("vit_tiny_patch16_224", 1), ("vit_betwixt_patch16_reg4_gap_256", 0)]
)
def test_a_model_at_another_size_equals_timms_own(name, prefix, tmp_path):
    """timm's model made at the new size, with its own resampling, against ours changed after. A class token's position
    stands before the grid's, four registers have none: either is kept apart."""
    small = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}
    theirs = randomised(timm.create_model(name, img_size=(32, 48), **small))
    ours = wt.from_timm(theirs)
    for size, patch in (((64, 40), 8), ((48, 48), 16), ((30, 36), 6)):
        weights = dict(theirs.state_dict())
        grid = [s // patch for s in size]
        weights["pos_embed"] = resample_abs_pos_embed(weights["pos_embed"], grid, [4, 6], prefix)
        weights["patch_embed.proj.weight"] = resample_patch_embed(
            weights["patch_embed.proj.weight"], [patch] * 2
        )
        wanted = timm.create_model(name, img_size=size, **{**small, "patch_size": patch}).eval()
        wanted.load_state_dict(weights)
        changed = wt.resize_images(copy.deepcopy(ours), size=size, patch=patch)
        x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            torch.testing.assert_close(changed({"image": x}), wanted(x), atol=1e-4, rtol=0)
            torch.testing.assert_close(again(changed, tmp_path)({"image": x}), changed({"image": x}))


def test_a_new_size_gives_what_the_old_model_gave_for_such_pictures():
    """Tables were stretched in each batch; now the table itself is. (2, 8) and (4, 4) patches are not taken for each other."""
    for size in ((64, 48), (16, 64), (32, 32)):
        model = classifier()
        x = torch.randn(2, 3, *size)
        with torch.no_grad():
            before = model({"image": x})
            assert wt.resize_images(model, size=size) is model
            torch.testing.assert_close(model({"image": x}), before, atol=1e-5, rtol=0)
        front = model.tokenizers["image"]
        assert front.size == size and front.pos_embed.shape == (size[0] // 8, size[1] // 8, 24)
        assert front.class_token.shape == (1, 1, 24) and front.registers.shape == (1, 2, 24)


def test_to_native_aspect_and_back(tmp_path):
    model = classifier(size=32)
    raw = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    front = model.tokenizers["image"]
    with torch.no_grad():
        before = model({"image": front.collate([raw])})
        wt.resize_images(model, size=None, max_tokens=64)
        wide = torch.randint(0, 256, (3, 40, 88), dtype=torch.uint8)
        both = model({"image": front.collate([raw, wide])})
        torch.testing.assert_close(both[:1], before, atol=1e-5, rtol=0)
        loaded = again(model, tmp_path)
        torch.testing.assert_close(loaded({"image": front.collate([raw, wide])}), both)
        wt.resize_images(model, size=32)
        torch.testing.assert_close(model({"image": front.collate([raw])}), before, atol=1e-5, rtol=0)


def test_identity_mode_freezing_and_gradients_live_through_a_change():
    model = classifier()
    front, trunk = model.tokenizers["image"], model.trunk
    wt.freeze(model, "tokenizers.image.proj")
    wt.resize_images(model.train(), size=64, patch=16)
    assert model.tokenizers["image"] is front and model.trunk is trunk and model.training
    assert not front.proj.weight.requires_grad and front.pos_embed.requires_grad
    model({"image": torch.randn(2, 3, 64, 64)}).sum().backward()
    assert front.pos_embed.grad is not None and front.proj.weight.grad is None
    with pytest.raises(wt.InputError, match=r"Transformer has no ImageTokenizer.*none"):
        wt.resize_images(trunk, size=64)
    with pytest.raises(wt.InputError, match=r"no ImageTokenizer under 'text'"):
        wt.resize_images(clip(), size=64, column="text")
    with pytest.raises(wt.InputError, match="1 or more"):
        wt.resize_images(model, size=0)


# ---- words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_new_words_for_a_language_model(tied, tmp_path):
    model = randomised(wt.LanguageModel(words(), wt.Transformer(24, 1, 4), tied=tied, bias=True))
    front = model.front
    old, table = front.vocab_size, front.embedding.weight.detach().clone()
    text = "the quick cat"
    ids = front.read(text)[None]
    with torch.no_grad():
        before = model({"text": Batch(ids=ids, lengths=(ids.shape[1],))})
        new = wt.grow_vocabulary(model, ["axolotl", "<img>"], spread=0.0)
        assert new == [old, old + 1] and model.front is front and front.vocab_size == old + 2
        after = model({"text": Batch(ids=ids, lengths=(ids.shape[1],))})
    assert after.shape[-1] == old + 2
    torch.testing.assert_close(after[..., :old], before)
    torch.testing.assert_close(front.embedding.weight[:old], table)
    # rows at the mean: their logit is the mean logit, so a new word starts as likely as an average one
    torch.testing.assert_close(after[..., old], before.mean(-1), atol=1e-4, rtol=0)
    assert front.decode(front.read("an axolotl sat")) == "an axolotl sat"
    assert new[0] in front.read("an axolotl sat").tolist()
    loaded = again(model, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded({"text": Batch(ids=ids, lengths=(ids.shape[1],))}), after)
    assert loaded.front.read("axolotl").tolist() == front.read("axolotl").tolist()
    # the grown model learns: gradients reach the new rows, through the head too
    rows = [{"text": "an axolotl sat"}]
    model.train().loss(model.collate([model.read(r) for r in rows]))["loss"].backward()
    assert float(model.head_weight.grad[new[0]].abs().sum()) > 0


def test_new_rows_spread_as_the_old_ones_do():
    """Mean, deviation and correlation of 3,000 new rows against those of the old ones."""
    front = randomised(words())
    with torch.no_grad():  # rows with a mean, unequal deviations, and two channels that go together
        w = front.embedding.weight
        w *= torch.linspace(0.2, 3.0, 24)
        w[:, 1] = w[:, 0] + 1.0
    old = front.vocab_size
    table = front.embedding.weight.detach().clone()
    wt.grow_vocabulary(front, [f"<{i}>" for i in range(3000)])
    new = front.embedding.weight.detach()[old:]
    torch.testing.assert_close(new.mean(0), table.mean(0), atol=0.25, rtol=0)
    torch.testing.assert_close(new.std(0), table.std(0), atol=0, rtol=0.08)
    torch.testing.assert_close(new[:, 1], new[:, 0] + 1.0, atol=1e-4, rtol=0)


def test_special_words_are_never_spelled_by_a_text():
    model = clip()
    front = model.tokenizers["text"]
    (new,) = wt.grow_vocabulary(model, ["<image>"], special=True)
    assert new not in front.read("a <image> of a cat").tolist()
    assert new in front.read("a <image> of a cat", special=True).tolist()
    for wrong in (["cat"], ["new", "new"], [""], []):
        with pytest.raises(wt.InputError, match="in the vocabulary already, empty, or named twice"):
            wt.grow_vocabulary(model, wrong) if wrong != ["cat"] else wt.grow_vocabulary(model, ["<image>"])


def test_new_words_in_clips_own_vocabulary(tmp_path):
    """A word that is not special is one token there too, and what does not hold it is read as before."""
    front = wt.TextTokenizer.clip(dim=8)
    before = front.encode_batch(["two cats & a dog", "an axolotl"])
    (new,) = wt.grow_vocabulary(front, ["axolotl"])
    assert new == 49408 and front.embedding.weight.shape == (49409, 8)
    assert front.encode_batch(["two cats & a dog"]) == before[:1]
    assert new in front.encode_batch(["an Axolotl"])[0]
    assert again(front, tmp_path).encode_batch(["an Axolotl"]) == front.encode_batch(["an Axolotl"])


def test_new_and_fewer_words_for_a_captioner(tmp_path):
    """Its head has weights of its own, and every caption begins with an id that the task holds."""
    fronts = {"image": wt.ImageTokenizer(24, patch=8, size=16), "text": words()}
    model = wt.Captioner(fronts, wt.Transformer(24, 1, 4, cross=True), tied=False)
    randomised(model)
    picture = torch.randint(
        0, 256, (3, 16, 16), generator=torch.Generator().manual_seed(5), dtype=torch.uint8
    )
    texts = ["a cat sat", "the lazy dog"]
    rows = [{"image": picture, "text": t} for t in texts]

    def losses() -> list[float]:
        with torch.no_grad():
            return [float(model.loss(model.collate([model.read(r)]))["loss"]) for r in rows]

    before, old = losses(), fronts["text"].vocab_size
    wt.grow_vocabulary(model, ["axolotl"], special=True)
    assert model.head.weight.shape == (old + 1, 24) and model.prefix == [fronts["text"].start_id]
    with torch.no_grad():
        model.head.weight[-1] = (
            0  # a word that takes part in the softmax: never likely against logits of tens
        )
    more = losses()
    assert all(b <= m < b + 3 for b, m in zip(before, more, strict=True))
    ids = wt.shrink_vocabulary(model, texts)
    assert model.head.weight.shape == (len(ids), 24) and model.prefix == [fronts["text"].start_id]
    assert all(f < m for f, m in zip(losses(), more, strict=True))  # fewer words to be mistaken for
    assert again(model, tmp_path).prefix == model.prefix
    dog = fronts["text"]._rust.token_to_id("g")
    held = wt.Captioner(fronts, wt.Transformer(24, 1, 4, cross=True), suppress=[dog])
    wt.shrink_vocabulary(held, ["a cat"])  # "g" is kept, under another number
    assert held.suppress == [fronts["text"]._rust.token_to_id("g")]


def test_a_shrunk_vocabulary_reads_its_texts_as_before(tmp_path):
    model = randomised(wt.LanguageModel(words(), wt.Transformer(24, 1, 4), tied=False, bias=True))
    front, old = model.front, model.front.vocab_size
    texts = ["a cat sat", "the lazy dog"]
    before = [front.read(t) for t in texts]
    with torch.no_grad():
        want = [model({"text": Batch(ids=i[None], lengths=(len(i),))}) for i in before]
    ids = wt.shrink_vocabulary(model, texts)
    assert front.vocab_size == len(ids) < old and model.head.weight.shape[0] == len(ids)
    back = torch.tensor(ids)
    for text, i, logits in zip(texts, before, want, strict=True):
        now = front.read(text)
        assert back[now].tolist() == i.tolist()  # the same tokens under new numbers
        with torch.no_grad():
            found = model({"text": Batch(ids=now[None], lengths=(len(now),))})
        torch.testing.assert_close(found, logits[..., back])
    assert front.decode(front.read("ünheard!")) == "ünheard!"  # any bytes still can be written
    assert again(model, tmp_path).front.read(texts[0]).tolist() == front.read(texts[0]).tolist()


def test_clips_vocabulary_shrunk_to_a_few_captions():
    front = wt.TextTokenizer.clip(dim=4)
    texts = ["a photo of a cat", "two dogs playing frisbee", "grandmother's unbelievable adventures"]
    before, table = front.encode_batch(texts), front.embedding.weight.detach().clone()
    ids = wt.shrink_vocabulary(front, texts, keep=["zebra</w>"])
    assert 512 < len(ids) < 700
    now = front.encode_batch(texts)
    assert [[ids[i] for i in row] for row in now] == before
    torch.testing.assert_close(front.embedding.weight, table[ids])
    assert len(front.encode_batch(["zebra"])[0]) == 3 and front.encode_batch(["zebra"])[0][-1] == front.end_id
    with pytest.raises(wt.InputError, match="are not in the vocabulary"):
        wt.shrink_vocabulary(front, texts, keep=["nosuchtoken"])


def test_longer_texts(tmp_path):
    front = randomised(words())
    table = front.position.detach().clone()
    stretched = wt.resize_context(copy.deepcopy(front), 31)
    assert stretched.position.shape == (31, 24)
    torch.testing.assert_close(stretched.position[::2], table)  # 16 places become every second of 31
    torch.testing.assert_close(stretched.position[1], (table[0] + table[1]) / 2)
    long = wt.resize_context(copy.deepcopy(front), 40, keep=4)
    torch.testing.assert_close(long.position[:4], table[:4])
    torch.testing.assert_close(long.position[39], table[15])
    new = wt.resize_context(copy.deepcopy(front), 20, how="new")
    torch.testing.assert_close(new.position[:16], table)
    assert wt.resize_context(copy.deepcopy(front), 5, how="new").position.shape == (5, 24)
    model = wt.LanguageModel(front, wt.Transformer(24, 1, 4))
    wt.resize_context(model, 64)
    assert model.context == 64 and model.front is front
    text = " ".join(["cats"] * 60)
    assert len(front.read(text)) == 64
    assert again(model, tmp_path).context == 64
    for wrong in ({"context": 0}, {"context": 8, "keep": 8}, {"context": 8, "how": "bend"}):
        with pytest.raises(wt.InputError):
            wt.resize_context(front, **wrong)


def test_a_berts_spare_places_are_used_first():
    front = wt.PairTokenizer(words()._rust, 24, context=8, places=12, start="<s>", end="<|endoftext|>")
    table = front.position.detach().clone()
    wt.resize_context(front, 10, how="new")
    assert front.context == 10 and torch.equal(front.position, table)
    wt.resize_context(front, 15, how="new")
    assert front.position.shape == (15, 24) and torch.equal(front.position[:12], table)
    front = wt.PairTokenizer(words()._rust, 24, context=8, places=12, start="<s>", end="<|endoftext|>")
    table = front.position.detach().clone()
    wt.resize_context(front, 15)
    torch.testing.assert_close(front.position[::2], table[:8])


@pytest.mark.slow
@pytest.mark.network
def test_a_published_encoder_keeps_its_vectors(tmp_path):
    """all-MiniLM-L6-v2 with a twelfth of its vocabulary, with a new word, with a longer context: the same vectors of 50
    verses (difference found: 0)."""
    verses = wt.open_rows("verses", split="test")
    texts = [verses[i]["target"] for i in range(0, 200, 4)]
    model = wt.from_hf(wt.weights("minilm"))
    want, count = model.embed(texts), sum(p.numel() for p in model.parameters())
    small = copy.deepcopy(model)
    ids = wt.shrink_vocabulary(small, texts)
    assert len(ids) < 3000 and sum(p.numel() for p in small.parameters()) < 0.55 * count
    torch.testing.assert_close(small.embed(texts), want, atol=1e-6, rtol=0)
    torch.testing.assert_close(again(small, tmp_path).embed(texts), want, atol=1e-6, rtol=0)
    (new,) = wt.grow_vocabulary(model, ["axolotl"])
    wt.resize_context(model, 300, how="new")
    assert new in model.tokenizer.read("an axolotl").tolist()
    torch.testing.assert_close(model.embed(texts), want, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.network
@torch.no_grad()
def test_a_published_language_model_keeps_its_logits():
    """SmolLM2-135M with one control token more, then with the 300 tokens that two sentences need: the same logits (of up to 30)."""
    model = wt.from_hf(wt.weights("smollm2"))
    texts = ["The capital of France is Paris.", "Water boils at 100 degrees."]

    def logits(text: str) -> torch.Tensor:
        ids = model.front.read(text)
        return model({model.column: Batch(ids=ids[None], lengths=(len(ids),))})

    want = logits(texts[0])
    assert wt.grow_vocabulary(model, ["<tool>"], special=True) == [49152]
    grown = logits(texts[0])
    torch.testing.assert_close(grown[..., :49152], want, atol=1e-4, rtol=0)
    ids = wt.shrink_vocabulary(model, texts)
    assert len(ids) < 320
    torch.testing.assert_close(logits(texts[0]), grown[..., ids], atol=1e-4, rtol=0)
    wt.resize_context(model, 4096)
    assert model.context == model.front.context == 4096


# ---- freezing ------------------------------------------------------------------------------------------------


def test_frozen_by_name():
    model = classifier()
    frozen = wt.freeze(model, "tokenizers", "trunk.blocks.[0-0].*")
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == set(frozen)
    assert "tokenizers.image.pos_embed" in frozen and "trunk.blocks.0.attn.qkv.weight" in frozen
    assert not any(n.startswith(("trunk.blocks.1", "head", "trunk.norm")) for n in frozen)
    # the optimizer, and so weight decay, leaves them out
    held = {id(p) for g in groups(model, OptimSettings()) for p in g["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}
    wt.unfreeze(model, "*")
    assert all(p.requires_grad for p in model.parameters())
    wt.freeze(model, "*")
    assert wt.unfreeze(model, "head") == ["head.weight", "head.bias"]


def test_what_is_frozen_gives_what_it_gave_in_training_too():
    """Drop path would leave halves out at random; a block that still learns goes on dropping."""
    model = classifier().train()
    x = torch.randn(8, 3, 32, 24)
    wt.freeze(model, "trunk")
    assert not model.trunk.training and not model.trunk.blocks[1].training and model.head.training
    model.train()  # as the loop calls it
    assert not model.trunk.blocks[1].training and model.tokenizers["image"].training
    torch.testing.assert_close(model({"image": x}), model({"image": x}), atol=0, rtol=0)
    wt.unfreeze(model, "trunk.blocks.1.norm1.weight")
    assert model.trunk.training and model.trunk.blocks[1].training and not model.trunk.blocks[0].training
    assert not torch.equal(model({"image": x}), model({"image": x}))
    assert not copy.deepcopy(model).train().trunk.blocks[0].training


def test_a_pattern_that_names_nothing_tells_what_is_near():
    with pytest.raises(
        wt.InputError, match=r"'trunk.block.0' names nothing in Classifier; near it: \['trunk.blocks"
    ):
        wt.freeze(classifier(), "trunk.block.0")
    with pytest.raises(wt.InputError, match=r"near it: \['tokenizers', 'trunk', 'head'\]"):
        wt.freeze(classifier(), "zzz")
    with pytest.raises(wt.InputError, match="one or more patterns"):
        wt.freeze(classifier())


# ---- one trunk, another front-end ----------------------------------------------------------------------------


class GivenSpectrum(nn.Module):
    """Stands for the filter bank: gives a spectrum that is known."""

    hop_length, pad_value = 160, 0.0

    def __init__(self, spectrum: torch.Tensor) -> None:
        super().__init__()
        self.spectrum = spectrum

    def forward(self, wave, lengths):
        return self.spectrum

    def frames(self, samples: int) -> int:
        return self.spectrum.shape[1]


@pytest.mark.parametrize("channels", ["sum", "mean"])
def test_a_picture_trunk_reads_a_spectrum_as_a_grey_picture(channels):
    """A grey image through the three-channel kernel, and the same numbers as a spectrum: equal logits. Frequency runs
    down the image and time to the right; AST's own kernel is the sum of the three."""
    front = wt.ImageTokenizer(24, patch=8, size=(32, 48), class_token=True)
    vit = randomised(wt.Classifier(front, wt.Transformer(24, 2, 4), 5))
    sounds = wt.AudioTokenizer(
        24, preset="ast", n_mels=32, patch=8, stride=8, seconds=0.48, config={"class_tokens": 1}
    )
    assert wt.adapt_tokenizer(front, sounds, channels) is sounds
    model = wt.Classifier(sounds, vit.trunk, 5, pool="first").eval()
    model.head.load_state_dict(vit.head.state_dict())
    grey = torch.randn(2, 1, 32, 48, generator=torch.Generator().manual_seed(4))
    sounds.spectrogram, sounds.max_samples = GivenSpectrum(grey[:, 0].mT), None
    x = grey.expand(-1, 3, -1, -1) / (1 if channels == "sum" else 3)
    with torch.no_grad():
        want = vit({"image": x})
        found = model({"audio": torch.zeros(2, 7680)})
    assert sounds.pos_embed.shape[:2] == (6, 4)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=0)


def test_a_real_sound_through_a_picture_trunk():
    """ViT's shape at AST's settings: positions are those of the 14 x 14 grid stretched to 12 x 101, and it trains."""
    front = wt.ImageTokenizer(24, patch=16, size=224, class_token=True)
    vit = randomised(wt.Classifier(front, wt.Transformer(24, 1, 4), 5))
    sounds = wt.adapt_tokenizer(
        front, wt.AudioTokenizer(24, preset="ast", config={"class_tokens": 2, "fixed_length": True})
    )
    want = resample_abs_pos_embed(front.pos_embed.detach().flatten(0, 1)[None], [12, 101], [14, 14], 0)
    torch.testing.assert_close(
        sounds.pos_embed.transpose(0, 1).flatten(0, 1)[None].detach(), want, atol=1e-5, rtol=0
    )
    assert torch.equal(sounds.class_embed[0, 0], front.class_token[0, 0])
    assert not torch.equal(sounds.class_embed[0, 1], front.class_token[0, 0])
    model = wt.Classifier(sounds, vit.trunk, 3)
    t = torch.arange(16000) / 16000
    batch = {"audio": sounds.collate([torch.sin(2 * math.pi * 440 * t)]), "label": torch.tensor([1])}
    loss = model.loss(batch)["loss"]
    loss.backward()
    assert torch.isfinite(loss) and model.trunk.blocks[0].attn.qkv.weight.grad.abs().sum() > 0


def test_a_clip_that_stands_still_gives_the_pictures_tokens():
    front = wt.ImageTokenizer(24, patch=8, size=32, positions="learned", draft=False)
    clips = wt.VideoTokenizer(24, tubelet=(2, 8, 8), frames=4, size=32, mean=front.mean, std=front.std)
    wt.adapt_tokenizer(randomised(front), clips)
    raw = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        still = clips(clips.collate([raw.expand(4, -1, -1, -1)]))
        picture = front(front.collate([raw]))
    torch.testing.assert_close(still.x[0, :16], picture.x[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(still.x[0, 16:], picture.x[0], atol=1e-4, rtol=0)


def test_what_cannot_be_reused_is_told():
    front = wt.ImageTokenizer(24, patch=8, size=32)
    with pytest.raises(wt.InputError, match="24 wide, the new ones 32"):
        wt.adapt_tokenizer(front, wt.AudioTokenizer(32, preset="ast"))
    with pytest.raises(wt.InputError, match="AudioTokenizer without patches"):
        wt.adapt_tokenizer(front, wt.AudioTokenizer(24, preset="whisper"))
    with pytest.raises(wt.InputError, match="a SeriesTokenizer cannot"):
        wt.adapt_tokenizer(front, wt.SeriesTokenizer(24))
