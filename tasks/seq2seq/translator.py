"""Machine translation with an encoder and a decoder.

The trunks select the model: two recurrent networks with a vector of fixed size in between (Cho et al. 2014; Sutskever et
al. 2014), additive attention (Bahdanau et al. 2015), or the Transformer (Vaswani et al. 2017).

    wt.Translator(columns, encoder=wt.Recurrent("gru", 256), decoder=wt.Recurrent("gru", 256, cross=True))
    wt.Translator(columns, encoder=wt.Recurrent("gru", 256, bidirectional=True), decoder=wt.AdditiveDecoder(256))
    wt.Translator(columns, encoder=wt.Transformer(256, 3, 4), decoder=wt.Transformer(256, 3, 4, cross=True))
"""

from __future__ import annotations

from collections.abc import Sequence

from worldtokens.errors import InputError
from worldtokens.tasks.seq2seq.alignment import Alignment, cross_attention, token_strings
from worldtokens.tasks.seq2seq.model import EncoderDecoder


class Translator(EncoderDecoder):
    """Generates the column ``"target"`` from the column ``"text"``; other arguments as in `EncoderDecoder`.

    The source tokenizer is bidirectional (``causal=False``), or causal if the encoder is a unidirectional RNN.
    """

    target_column = "target"

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
            texts: a list of texts, or one text.
            beams: beams of the search; 1 is greedy.
            max_new_tokens: the most ids per translation; None: the model's setting.
            length_penalty: see `beam_search`.
            prefix: ids or special tokens at the start of every translation, in place of the model's own.
            batch_size: texts per batch.

        Raises:
            InputError: a text cannot be read.
        """
        texts = [texts] if isinstance(texts, str) else texts
        options = {"beams": beams, "max_new_tokens": max_new_tokens, "length_penalty": length_penalty}
        return self.generate_texts(texts, batch_size, prefix=prefix, **options)

    def align(self, text: str, target: str | None = None, layer: int = -1, beams: int = 1) -> Alignment:
        """Cross-attention weights of each target token over the source tokens, the mean over heads.

        Args:
            text: the source text.
            target: the target text. None: the generated translation.
            layer: index of the decoder layer.
            beams: beams of the search for the generated translation.

        Raises:
            InputError: the decoder has no cross-attention, or the source is no text.
        """
        if len(self.sources) != 1 or not hasattr(self.tokenizers[self.sources[0]], "token_bytes"):
            raise InputError(f"an alignment needs one text source, this model has the sources {self.sources}")
        target = self.translate(text, beams=beams)[0] if target is None else target
        source = self.tokenizers[self.sources[0]]
        attention = cross_attention(self, {self.sources[0]: text}, target)
        ids = source.read(text).tolist()
        return Alignment(
            token_strings(self.front, attention.ids), token_strings(source, ids), attention.weights[layer]
        )
