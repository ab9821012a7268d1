"""CLIP's ids equal open_clip's for real and odd text, from any thread, with a bounded word cache."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from worldtokens.tokenizers.text import clip_bpe

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


def open_clip_ids(peer, text: str) -> list[int]:
    ids = [peer.sot_token_id, *peer.encode(text), peer.eot_token_id]
    return ids if len(ids) <= 77 else [*ids[:76], peer.eot_token_id]


@pytest.mark.filterwarnings("ignore:a text of")
def test_ids_equal_open_clip(clip, peer, real):
    assert len(real) > 10_000
    texts = real + ODD
    ours = clip.encode_batch(texts)
    wrong = [(t, a) for t, a in zip(texts, ours, strict=True) if a != open_clip_ids(peer, t)]
    assert not wrong, wrong[:3]
    # the same one by one, where another proof of "nothing to change" applies
    for text in [*real[::400], *ODD]:
        assert clip.read(text).tolist() == open_clip_ids(peer, text), text
    assert torch.equal(padded(clip.batch(texts).get("ids"), 77), peer(texts))


def padded(ids: torch.Tensor, n: int) -> torch.Tensor:
    return torch.nn.functional.pad(ids, (0, n - ids.shape[1]))


@pytest.mark.filterwarnings("ignore:a text of")
def test_a_word_of_a_megabyte_is_encoded_and_not_cached(clip, peer):
    text = "a" * 1_000_000
    assert clip.read(text).tolist() == open_clip_ids(peer, text)
    assert text not in clip.encoder.words._table, "one long word must not stay in the cache"


@pytest.mark.filterwarnings("ignore:a text of")
def test_threads_with_different_contexts(clip, trained, real):
    texts = real[:: len(real) // 100]
    for tokenizer in (clip, trained):
        want = {n: tokenizer.encode_batch(texts, context=n) for n in range(4, 20)}
        fresh = copy.deepcopy(tokenizer)
        if fresh.encoder.words is not None:
            fresh.encoder.words._limit = 300  # the cache is cleared all the time
        with ThreadPoolExecutor(16) as pool:
            jobs = [(n, pool.submit(fresh.encode_batch, texts, context=n)) for n in list(want) * 3]
        assert all(job.result() == want[n] for n, job in jobs)


def test_word_cache_is_bounded(clip, real):
    words = clip_bpe.WordCache(clip.backend, limit=5000)
    start = len(words._table)
    for at in range(0, 4000, 50):
        words.encode(real[at : at + 50], [], [])
        assert sum(map(len, list(words._table)[start:])) <= 5000
