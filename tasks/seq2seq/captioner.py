"""Captioning of images, audio or video: a decoder with cross-attention to the source tokens.

Speech-to-text is the same class with an AudioTokenizer. The first such model was Show, Attend and Tell (Xu et al. 2015);
the encoder-decoder Transformer used here is that of Vaswani et al. (2017) and Whisper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from worldtokens.tasks.seq2seq.alignment import CrossAttention, cross_attention
from worldtokens.tasks.seq2seq.model import EncoderDecoder


class Captioner(EncoderDecoder):
    """Generates the text column from all other columns; arguments as in `EncoderDecoder`.

        wt.Captioner({"image": wt.ImageTokenizer(...), "text": wt.TextTokenizer(...)}, decoder=wt.Transformer(..., cross=True))

    Every column except the text is a source: with an `AudioTokenizer` under ``"audio"`` the model transcribes speech. The
    tokens of several sources are concatenated; rows may lack a column.
    """

    def caption(
        self,
        sources: Sequence[Any],
        beams: int = 1,
        max_new_tokens: int | None = None,
        length_penalty: float = 1.0,
        prefix: Sequence[int | str] | None = None,
        batch_size: int = 32,
    ) -> list[str]:
        """Sources -> texts.

        Args:
            sources: rows such as ``{"image": "cat.jpg"}``; with one source column also bare inputs of its tokenizer.
            beams: beams of the search; 1 is greedy.
            max_new_tokens: the most ids per text; None: the model's setting.
            length_penalty: see `beam_search`.
            prefix: ids or special tokens at the start of every text, in place of the model's own.
            batch_size: sources per batch.

        Raises:
            InputError: a source cannot be read.
        """
        options = {"beams": beams, "max_new_tokens": max_new_tokens, "length_penalty": length_penalty}
        return self.generate_texts(sources, batch_size, prefix=prefix, **options)

    def cross_attention(self, source: Any, text: str | None = None) -> CrossAttention:
        """Cross-attention weights for each id of a caption; `figures.attention` draws them.

        Args:
            source: a source, as in `caption`.
            text: the caption. None: the generated one.

        Raises:
            InputError: the source cannot be read, or the decoder has no cross-attention.
        """
        row = source if isinstance(source, Mapping) else {self.sources[0]: source}
        return cross_attention(self, row, self.caption([row])[0] if text is None else text)
