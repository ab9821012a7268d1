"""Text: ids equal to open_clip's, text back from ids, threads, forks, and what a saved folder remembers."""

from __future__ import annotations

import copy
import html
import json
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import unicodedata
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import worldtokens as wt
from worldtokens.data import samples
from worldtokens.tokenizers.text import clip_bpe

LANGUAGES = Path(__file__).parents[2] / "texts" / "languages.json"  # licences in NOTICE.md beside it

ODD = [
    "",
    " ",
    "\t\r\n\x0b\x0c\u2028\u2029\x85\xa0\u3000",
    "a\xa0b\u2003c\u2028d\te\r\nf\x1cg\x1fh\x85i",
    "\x00a\x01b\x07c\x1b[31mred\x1b[0m \x7f\ufeffx \ufffc",
    "\u206aa\u200bb\u200cc\u200dd\u00ade",
    "👩🏽‍🚀 👨‍👩‍👧‍👦 🏴󠁧󠁢󠁳󠁣󠁴󠁿 ☝🏿 1️⃣ 🇫🇷❤️‍🔥",
    "fish &amp; chips &amp;amp; &lt;b&gt; &eacute;t&eacute; &#x1F600; &#233; &amp;#233; & &; &nbsp;x",
    "<b>caf&eacute;</b> &lt;&amp;lt;",
    "&#xFB01; &#x2019; &#x1F; &#0; &#xD800; &#x2028;z &amp;quot;",
    "ﬁne ﬂow eﬃcient ﬅ ĳ Ǆ ŉ",
    "“curly” ‘quotes’ „low‚ ʼn’est l’été «là»",
    "it's I'M we'LL they'd you've o'clock 'S '' 'tis 'ſ don’t",
    "schÃ¶n voilÃ\xa0 â€œquotedâ€\x9d Ð¿Ñ€Ð¸Ð²ÐµÑ‚ RÃ©sumÃ© âœ” uÌˆ l’Ã©tÃ©",
    "cafe\u0301 A\u030a n\u0303 \u0301alone Zalgo\u0335\u0336\u0337 각 \u1100\u1161\u11a8",
    "ＦＵＬＬ　ｗｉｄｔｈ １２３ ｶﾀｶﾅ",
    "İstanbul IŞIK ıssız Straße STRASSE ẞ ΟΔΟΣ Σ ΣΑΣ. ὈΔΥΣΣΕΎΣ ΑΣ-ΑΣ",
    "中文字符 日本語のテキスト 한국어 ไทย हिन्दी ქართული ՀԱՅ ខ្មែរ العربية ١٢٣ עברית \U00020000\U00030000",
    "\U000107bb\U00010940 newer letters \U0001e900 \U00010d4a",
    "½ ² Ⅷ ৪ ๔ 100.000,50 3-D x²+y² №5 ¼",
    "C-C В-Г Г-Р œuf Œuvre cœur éÉ aÀ Â£ Ã x × ØØ ÖÄÜ à² вЂ",
    "a" * 5000,
    "é" * 3000,
    "word " * 500,
    "'" * 300,
    "a.b" * 200,
    "!?" * 100 + "…",
    "a<|endoftext|>b <|startoftext|> <image> [CLS] </s> </w>",
    "a\ud800b \udfff",
]


@pytest.fixture(scope="module")
def clip() -> wt.TextTokenizer:
    torch.manual_seed(0)
    return wt.TextTokenizer.clip(dim=4)


@pytest.fixture(scope="module")
def peer():
    import open_clip

    return open_clip.get_tokenizer("ViT-B-32")


@pytest.fixture(scope="module")
def real() -> list[str]:
    """Real strings in 26 languages, and the same ones as careless programs write them."""
    texts = {t for rows in json.loads(LANGUAGES.read_text(encoding="utf-8")).values() for t in rows}
    for row in list(samples.open("emoji", languages=("en", "fr", "de", "es", "ru", "ja")))[::6]:
        texts |= {row["char"] + " " + row["text"][0], *row["labels"].values()}
    texts = sorted(texts)
    texts += [html.escape(html.escape(t)) for t in texts[::29]]
    texts += [t.encode("ascii", "xmlcharrefreplace").decode() for t in texts[::23]]
    texts += [t.encode().decode("latin-1") for t in texts[::17]]
    texts += [t.encode().decode("cp1252", "ignore") for t in texts[::19]]
    texts += [t.upper() for t in texts[::5]]
    texts += [unicodedata.normalize("NFD", t) for t in texts[::7]]
    texts += [t.replace("'", "’").replace(" ", "\xa0", 1) for t in texts[::11]]
    return texts


def by_peer(peer, text: str) -> list[int]:
    ids = [peer.sot_token_id, *peer.encode(text), peer.eot_token_id]
    return ids if len(ids) <= 77 else [*ids[:76], peer.eot_token_id]


@pytest.fixture
def trained() -> wt.TextTokenizer:
    torch.manual_seed(0)
    texts = ["the cat sat on the mat", "the dog sat on the log"] * 4
    return wt.TextTokenizer.train(texts, vocab_size=300, dim=8, start="<s>", specials=["<image>"], context=32)


# ---- ids -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:a text of")
def test_ids_equal_open_clip(clip, peer, real):
    assert len(real) > 10_000
    texts = real + ODD
    ours = clip.encode_batch(texts)
    wrong = [(t, a) for t, a in zip(texts, ours, strict=True) if a != by_peer(peer, t)]
    assert not wrong, wrong[:3]
    # the same one by one, where another proof of "nothing to mend" is at work
    for text in [*real[::400], *ODD]:
        assert clip.read(text).tolist() == by_peer(peer, text), text
    assert torch.equal(padded(clip.batch(texts).get("ids"), 77), peer(texts))


def padded(ids: torch.Tensor, n: int) -> torch.Tensor:
    return torch.nn.functional.pad(ids, (0, n - ids.shape[1]))


@pytest.mark.filterwarnings("ignore:a text of")
def test_a_megabyte_of_one_word(clip, peer):
    text = "a" * 1_000_000
    assert clip.read(text).tolist() == by_peer(peer, text)
    assert text not in clip._words._table, "one long word must not stay in memory"


def test_every_character_is_mended_as_ftfy_does():
    from open_clip.tokenizer import _clean_lower

    # ideographs, Hangul and the empty planes by samples, all else one by one
    dull = [(0x3400, 0x9F00), (0xAC00, 0xD7A0), (0xD810, 0xDFF0), (0xE000, 0xF8F0), (0x17000, 0x1B000)]
    for code in [*range(0x1FB00), *range(0x1FB00, 0x110000, 997), *range(0xE0000, 0xE0200)]:
        if code % 64 and any(a <= code < b for a, b in dull):
            continue
        for frame in ("a{}b", "Я {} é"):
            text = frame.format(chr(code))
            assert clip_bpe.clean(text) == _clean_lower(text), hex(code)


def test_random_text_is_mended_as_ftfy_does():
    """Mojibake is a matter of neighbours: characters of ftfy's own patterns, thrown together."""
    from ftfy.badness import MOJIBAKE_CATEGORIES
    from open_clip.tokenizer import _clean_lower

    rng = random.Random(0)
    classes = "".join(f"{k}" for k in MOJIBAKE_CATEGORIES.values())
    hard = [c for c in map(chr, range(0x80, 0x2600)) if c in classes]
    tame = [c for c in map(chr, range(0x20, 0x600)) if not clip_bpe._unsafe(c)]
    for pool in (tame, hard + tame[:95], hard):
        texts = [
            "".join(rng.choices(pool, k=rng.randint(2, 7)) + rng.choices(" -aÉéГ’", k=3)) for _ in range(4000)
        ]
        texts = [
            unicodedata.normalize("NFC", t) for t in texts
        ]  # as a batch, so that the proof by table is tried
        wanted = [_clean_lower(t) for t in texts]
        for text, whole, want in zip(texts, clip_bpe.mend_all(texts), wanted, strict=True):
            assert clip_bpe.clean(text) == want, text
            assert " ".join(whole.split()).lower() == want, text


def test_cut_text_keeps_its_end_and_says_so_once():
    clip = wt.TextTokenizer.clip(dim=1, context=8)
    with pytest.warns(UserWarning, match=r"102 ids was cut to context=8.*context=102"):
        ids = clip.read("cat " * 100)
    assert ids.tolist() == [49406, *[2368] * 6, 49407]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clip.encode_batch(["cat " * 100, "cat"], context=4) == [
            [49406, 2368, 2368, 49407],
            [49406, 2368, 49407],
        ]
        assert clip.read("cat " * 100, end=False).tolist() == [49406, *[2368] * 7]
    assert clip.read("a cat", end=False).tolist() == [49406, 320, 2368]


def test_text_never_spells_a_control_token(clip, trained):
    for tokenizer, names in ((clip, ["<|endoftext|>", "<|startoftext|>"]), (trained, ["<image>", "<s>"])):
        for name in names:
            special = tokenizer._rust.token_to_id(name)
            inside = tokenizer.read(f"a{name}b", end=False)[1:].tolist()
            assert special not in inside and len(inside) > 3
            asked = tokenizer.read(f"a{name}b", special=True, end=False)[1:].tolist()
            assert asked.count(special) == 1
            assert tokenizer.decode(asked, special=True).replace(" ", "") == f"a{name}b"
    # open_clip's spelling of its control tokens is text here (there it is a control token)
    assert clip.read("<end_of_text>").tolist().count(49407) == 1


def test_word_level_vocabulary_refuses_to_leak_a_control_token():
    import tokenizers

    vocab = {"[UNK]": 0, "[SEP]": 1, "cat": 2}
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    rust.add_special_tokens(["[UNK]", "[SEP]"])
    tokenizer = wt.TextTokenizer(rust, dim=2, end="[SEP]")
    assert tokenizer.read("cat dog").tolist() == [2, 0, 1]
    assert tokenizer.decode([2, 2, 1]) == "cat cat" == "".join(tokenizer.stream([2, 2, 1]))
    with pytest.raises(wt.InputError, match=r"text 0 .* spells a special token"):
        tokenizer.read("cat [SEP] cat")
    assert tokenizer.read("cat [SEP]", special=True).tolist() == [2, 1, 1]


@pytest.mark.parametrize("bad", [b"a cat", 3, None, ["a cat"]])
def test_what_is_not_text_is_refused(clip, trained, bad):
    for tokenizer in (clip, trained):
        with pytest.raises(wt.InputError, match=f"text 1 of the batch is a {type(bad).__name__}"):
            tokenizer.encode_batch(["fine", bad])
    with pytest.raises(wt.InputError, match="expected a list"):
        clip.encode_batch("a cat")


def test_lone_surrogates(trained, clip):
    with pytest.raises(wt.InputError, match=r"text 1 .* surrogate '.ud800' at character 1"):
        trained.encode_batch(["fine", "a\ud800"])
    assert clip.read("a\ud800").tolist() == clip.read("a\ufffd").tolist()  # ftfy mends it


# ---- back to text --------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_byte_level_text_comes_back_exactly(text):
    tokenizer = _byte_level()
    ids = tokenizer.read(text)
    assert tokenizer.decode(ids) == text
    pieces = list(tokenizer.stream(iter(ids.tolist())))
    assert "".join(pieces) == text
    assert all(pieces) and ("\ufffd" in text or not any("\ufffd" in p for p in pieces))


_made: list[wt.TextTokenizer] = []


def _byte_level() -> wt.TextTokenizer:
    if not _made:
        _made.append(wt.TextTokenizer.train(["a cat 猫"], 257, dim=1, context=None, positions="none"))
    return _made[0]


def test_stream_flushes_what_stays_incomplete():
    tokenizer = _byte_level()
    ids = tokenizer.read("a猫", end=False).tolist()[:-1]  # the last of three bytes is missing
    assert list(tokenizer.stream(ids)) == ["a", "\ufffd"] and tokenizer.decode(ids) == "a\ufffd"
    with pytest.raises(wt.InputError, match="id 9999 is outside"):
        tokenizer.decode([9999])


def test_clip_decodes_to_clean_text(clip):
    assert clip.decode(clip.read("  A  Photo of\n猫 &amp; 👩🏽‍🚀!")) == "a photo of 猫 & 👩🏽‍🚀!"
    assert clip.decode(clip.read("a cat"), special=True) == "<|startoftext|>a cat <|endoftext|>"


# ---- tokens --------------------------------------------------------------------------------------------------


def test_batch_is_padded_to_its_longest_and_read_causally(clip):
    batch = clip.collate([clip.read("a cat"), clip.read(""), clip.read("a black cat")])
    assert batch["ids"].shape == (3, 5) and batch["lengths"] == (4, 2, 5)
    assert batch["ids"].dtype == torch.int64
    same = clip.batch(["a cat", "", "a black cat"])
    assert torch.equal(same["ids"], batch["ids"]) and same["lengths"] == batch["lengths"]
    tokens = clip(batch)
    assert tokens.valid.sum(1).tolist() == [4, 2, 5]
    assert tokens.block[0].tolist() == tokens.pos[0, :, 0].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(tokens.ids, batch["ids"])
    expected = clip.embedding.weight[batch["ids"]] + clip.position[:5]
    assert torch.equal(tokens.x, expected)
    assert tokens.layout == wt.Layout.simple([4, 2, 5], "causal")
    assert torch.equal(clip.tokens(["a cat", "", "a black cat"]).x, tokens.x)


def test_ids_padded_by_open_clip_are_understood(clip, peer):
    ids = peer(["a cat", "", "a photo of a dog"])
    tokens, own = clip(ids), clip.tokens(["a cat", "", "a photo of a dog"])
    assert tokens.layout.lengths == own.layout.lengths
    assert torch.equal(tokens.x[own.valid.nonzero(as_tuple=True)], own.x[own.valid])
    assert torch.equal(clip(ids.int()).x, tokens.x)
    with pytest.raises(wt.InputError, match=r"row 1 .* no end token"):
        clip(torch.tensor([[49406, 49407], [49406, 320]]))
    with pytest.raises(wt.InputError, match="ids run from 0 to 49408"):
        clip(torch.tensor([[49408, 0, 49407]]))
    with pytest.raises(wt.InputError, match="expected whole numbers"):
        clip(torch.rand(1, 5))
    with pytest.raises(wt.InputError, match="78 ids in a row, but context=77"):
        clip(torch.full((1, 78), 49407))


def test_end_token_is_found_though_others_have_larger_ids(trained):
    assert trained.end_id == 0 and trained._rust.token_to_id("<image>") > 0
    ids = torch.tensor([[1, 2, 60, 0, 0, 0], [1, 60, 61, 62, 63, 0]])
    assert trained(ids).valid.sum(1).tolist() == [4, 6]


def test_settings_out_of_range():
    for kwargs, said in [
        ({"positions": "sincos"}, "positions is 'sincos'"),
        ({"cleaning": "lower"}, "cleaning is 'lower'"),
        ({"context": None}, "learned positions need"),
        ({"context": 1, "end": "<|endoftext|>"}, "no room for text"),
        ({"end": "</s>"}, r"end='</s>' isn't in the vocabulary.*<\|endoftext\|>"),
        ({"vocabulary": "nowhere.json"}, "no vocabulary at 'nowhere.json'"),
        ({"vocabulary": 3}, "vocabulary is a int"),
    ]:
        with pytest.raises(wt.InputError, match=said):
            wt.TextTokenizer(**{"vocabulary": "clip", "dim": 1} | kwargs)
    with pytest.raises(wt.InputError, match="give 257 or more"):
        wt.TextTokenizer.train(["a"], vocab_size=256)
    with pytest.raises(wt.InputError, match="text 1 is a NoneType"):
        wt.TextTokenizer.train(["a", None])
    with pytest.raises(wt.InputError, match="at least one"):
        _byte_level().collate([])


def test_train_on_the_class_learns_and_on_an_instance_sets_the_mode(trained):
    assert trained.training and trained.train(False) is trained and not trained.training
    assert torch.nn.Sequential(trained).train()[0].training


# ---- training a vocabulary, saving -------------------------------------------------------------------------


def test_training_is_deterministic_in_every_process():
    from worldtokens.tokenizers.text.vocabulary import train_bpe

    texts = [t for rows in json.loads(LANGUAGES.read_text(encoding="utf-8")).values() for t in rows[:60]]
    here = train_bpe(texts, 900, None, "<|endoftext|>", (), 2).to_str()
    assert train_bpe(texts, 900, None, "<|endoftext|>", (), 2).to_str() == here
    code = (
        "import json, sys; from worldtokens.tokenizers.text.vocabulary import train_bpe;"
        "sys.stdout.write(train_bpe(json.load(sys.stdin), 900, None, '<|endoftext|>', (), 2).to_str())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(texts),
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONHASHSEED": "7", "PYTHONUTF8": "1"},
    )
    assert run.stdout == here, run.stderr


def test_saved_folder_gives_everything_back(tmp_path, trained, clip):
    text = "The  CAT &amp; the dog<image>"
    for name, tokenizer in (("own", trained), ("clip", clip)):
        tokenizer.save(tmp_path / name)
        assert (tmp_path / name / "tokenizer.json").is_file()
        again = wt.load(tmp_path / name)
        assert again.encode_batch([text]) == tokenizer.encode_batch([text])
        assert again.encode_batch([text], special=True) == tokenizer.encode_batch([text], special=True)
        for what in ("dim", "context", "causal", "cleaning", "start_id", "end_id", "pad_id", "vocab_size"):
            assert getattr(again, what) == getattr(tokenizer, what), what
        assert torch.equal(again.tokens([text]).x, tokenizer.tokens([text]).x)
        again.save(tmp_path / name)  # over itself
        assert wt.load(tmp_path / name).encode_batch([text]) == tokenizer.encode_batch([text])


class Pair(wt.Part):
    def __init__(self, a: wt.TextTokenizer, b: wt.TextTokenizer) -> None:
        super().__init__()
        self.a, self.b = a, b


def test_two_vocabularies_in_one_model_keep_their_own_files(tmp_path, trained, monkeypatch):
    other = wt.TextTokenizer.train(["entirely other words, another text"] * 3, vocab_size=280, dim=8)
    # a test's class is not importable by name from a saved config
    monkeypatch.setattr(
        "worldtokens.parts._find_class", lambda n: Pair if n.endswith("Pair") else wt.TextTokenizer
    )
    Pair(trained, other).save(tmp_path)
    again = wt.load(tmp_path)
    for part, was in ((again.a, trained), (again.b, other)):
        assert part._rust.to_str() == was._rust.to_str()
    assert len(list(tmp_path.glob("tokenizer*.json"))) == 2


def test_vocabulary_file_tells_its_start_and_end(tmp_path, trained, clip):
    for tokenizer in (trained, clip):
        path = tokenizer.save_vocabulary(tmp_path / "v" / "tokenizer.json")
        again = wt.TextTokenizer.from_file(path, dim=2, context=32)
        assert (again.start_id, again.end_id) == (tokenizer.start_id, tokenizer.end_id)
        assert again.read("the cat sat").tolist() == tokenizer.read("the cat sat").tolist()


def test_vocabulary_file_serves_hugging_face_too(tmp_path, clip):
    import tokenizers

    there = tokenizers.Tokenizer.from_file(str(clip.save_vocabulary(tmp_path / "tokenizer.json")))
    text = "a photo of two cats, it's 2026!"
    assert there.encode(text).ids == clip.read(text).tolist()


def test_copies_and_pickles_stay_safe(clip, trained):
    for tokenizer, name in ((clip, "<|endoftext|>"), (trained, "<image>")):
        for again in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
            assert again.encode_batch([f"a{name}b"]) == tokenizer.encode_batch([f"a{name}b"])
            assert again.decode(again.read("a cat")) == "a cat"


def test_given_vocabulary_object_is_copied():
    import tokenizers

    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    rust.enable_truncation(2)
    rust.enable_padding(length=7)
    tokenizer = wt.TextTokenizer(rust, dim=1)
    rust.enable_truncation(1)
    assert tokenizer.read("a b a b").tolist() == [0, 1, 0, 1]


# ---- threads and processes ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:a text of")
def test_threads_that_cut_differently(clip, trained, real):
    texts = real[:: len(real) // 100]
    for tokenizer in (clip, trained):
        want = {n: tokenizer.encode_batch(texts, context=n) for n in range(4, 20)}
        fresh = copy.deepcopy(tokenizer)
        if fresh._words is not None:
            fresh._words._limit = 300  # the table starts anew all the time
        with ThreadPoolExecutor(16) as pool:
            jobs = [(n, pool.submit(fresh.encode_batch, texts, context=n)) for n in list(want) * 3]
        assert all(job.result() == want[n] for n, job in jobs)


def test_word_table_is_bounded(clip, real):
    words = clip_bpe.Words(clip._rust, limit=5000)
    start = len(words._table)
    for at in range(0, 4000, 50):
        words.encode(real[at : at + 50], [], [])
        assert sum(map(len, list(words._table)[start:])) <= 5000


FORK = """
import os, torch, worldtokens as wt
texts = [f"a photo of {i} cats and the word w{i}" for i in range(600)]
own = wt.TextTokenizer.train(texts, 400, dim=1)
for setting in (None, "true"):
    os.environ.pop("TOKENIZERS_PARALLELISM", None)
    if setting:
        os.environ["TOKENIZERS_PARALLELISM"] = setting
    for tokenizer in (wt.TextTokenizer.clip(dim=1), own):
        want = tokenizer.encode_batch(texts)                   # Rust's threads are awake now
        loader = torch.utils.data.DataLoader(
            texts, batch_size=150, num_workers=2, multiprocessing_context="fork", collate_fn=tokenizer.encode_batch)
        assert [row for rows in loader for row in rows] == want
    assert os.environ.get("TOKENIZERS_PARALLELISM") == setting
print("done")
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_forked_workers_are_quiet_and_do_not_hang():
    run = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=240)
    assert run.stdout == "done\n", run.stderr[-2000:]
    assert "parallelism" not in run.stderr and "forked" not in run.stderr, run.stderr


def test_keeps_the_contract_of_front_ends(trained):
    from worldtokens.testing import check_tokenizer

    check_tokenizer(trained, ["the cat", "a", "the dog sat on the log", "猫"], bad=[b"bytes", 3, "\ud800"])


def test_an_id_spells_its_bytes(clip):
    """The bytes of all pieces are the text's own, also where a piece is half a character."""
    text = "naïve 🎉 猫"
    ids = clip.read(text).tolist()
    assert clip.spell(ids[0]) == b"<|startoftext|>"
    assert b"".join(map(clip.spell, ids[1:-1])) == text.replace(" ", "").encode()
    with pytest.raises(wt.InputError, match="outside"):
        clip.spell(clip.vocab_size)
