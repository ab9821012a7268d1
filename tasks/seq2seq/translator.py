"""From one language to another: an encoder reads the source, a decoder writes the target.

The same class holds the road that led here, by its trunks alone: a vector of fixed size between two recurrent networks
(Cho et al. 2014; Sutskever et al. 2014), additive attention (Bahdanau et al. 2015), the Transformer (Vaswani et al. 2017).

    wt.Translator(columns, encoder=wt.Recurrent("gru", 256), decoder=wt.Recurrent("gru", 256, cross=True))
    wt.Translator(columns, encoder=wt.Recurrent("gru", 256, bidirectional=True), decoder=wt.AdditiveDecoder(256))
    wt.Translator(columns, encoder=wt.Transformer(256, 3, 4), decoder=wt.Transformer(256, 3, 4, cross=True))
"""

from __future__ import annotations

from collections.abc import Sequence

from worldtokens.errors import InputError
from worldtokens.tasks.seq2seq.alignment import Alignment, look, pieces
from worldtokens.tasks.seq2seq.model import EncoderDecoder


class Translator(EncoderDecoder):
    """Writes the column ``"target"`` from the column ``"text"``; other arguments as in `EncoderDecoder`.

    The source's front-end reads its text together (``causal=False``), or left to right where the encoder is recurrent in
    one direction.
    """

    written = "target"

    def translate(
        self,
        texts: Sequence[str] | str,
        beams: int = 1,
        max_new_tokens: int | None = None,
        length_penalty: float = 1.0,
        prefix: Sequence[int | str] | None = None,
        batch_size: int = 32,
    ) -> list[str]:
        """Texts -> translations.

        Args:
            texts: a list of str, or one.
            beams: continuations kept alive in the search; 1 takes the likeliest id each time.
            max_new_tokens: the longest answer; None: the model's own setting.
            length_penalty: see `beam_search`.
            prefix: ids or special tokens that the answer is told to begin with, instead of the model's own.
            batch_size: texts worked on at a time.

        Raises:
            InputError: a text cannot be read.
        """
        texts = [texts] if isinstance(texts, str) else texts
        how = {"beams": beams, "max_new_tokens": max_new_tokens, "length_penalty": length_penalty}
        return self.answer(texts, batch_size, prefix=prefix, **how)

    def align(self, text: str, target: str | None = None, layer: int = -1, beams: int = 1) -> Alignment:
        """Where the decoder looks in `text` before it writes each piece, the mean over heads.

        Args:
            text: the source.
            target: what it is told to write. None: its own translation.
            layer: of the decoder.
            beams: of the search for its own translation.

        Raises:
            InputError: the decoder has no attention to its context.
        """
        if len(self.sources) != 1 or not hasattr(self.tokenizers[self.sources[0]], "spell"):
            raise InputError("an alignment is between two texts: this model reads something else")
        target = self.translate(text, beams=beams)[0] if target is None else target
        source = self.tokenizers[self.sources[0]]
        seen = look(self, {self.sources[0]: text}, target)
        read = source.read(text).tolist()
        return Alignment(pieces(self.front, seen.written), pieces(source, read), seen.weights[layer])
