"""Telling in words what an image, a sound or a clip holds: a decoder reads its tokens by cross-attention.

Speech-to-text is the same class with a front-end for sound. The first such model was Show, Attend and Tell (Xu et al.
2015); the form here, one encoder and one decoder of the same blocks, is Vaswani et al.'s (2017), and Whisper's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from worldtokens.tasks.seq2seq.alignment import Looking, look
from worldtokens.tasks.seq2seq.model import EncoderDecoder


class Captioner(EncoderDecoder):
    """Writes the text column from all the others; arguments as in `EncoderDecoder`.

        wt.Captioner({"image": wt.ImageTokenizer(...), "text": wt.TextTokenizer(...)}, decoder=wt.Transformer(..., cross=True))

    Any column but the text is read: put an `AudioTokenizer` under ``"audio"`` and it writes down speech. Rows may lack a
    column, and several are set side by side.
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
            sources: rows such as ``{"image": "cat.jpg"}``, or, where one column is read, what its front-end reads.
            beams: continuations kept alive in the search; 1 takes the likeliest id each time.
            max_new_tokens: the longest answer; None: the model's own setting.
            length_penalty: see `beam_search`.
            prefix: ids or special tokens that the answer is told to begin with, instead of the model's own.
            batch_size: sources worked on at a time.

        Raises:
            InputError: a source cannot be read.
        """
        how = {"beams": beams, "max_new_tokens": max_new_tokens, "length_penalty": length_penalty}
        return self.answer(sources, batch_size, prefix=prefix, **how)

    def look(self, source: Any, text: str | None = None) -> Looking:
        """Where the decoder looks for each id that it writes; `apps.attention_look` draws it.

        Args:
            source: as `caption` takes it.
            text: what it is told to write. None: its own caption.

        Raises:
            InputError: the source cannot be read, or the decoder has no attention to its context.
        """
        row = source if isinstance(source, Mapping) else {self.sources[0]: source}
        return look(self, row, self.caption([row])[0] if text is None else text)
