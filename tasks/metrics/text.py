"""How near written answers come to the right ones: BLEU, chrF, word error rate, share of exact hits.

BLEU (Papineni et al. 2002) and chrF (Popović 2015) are sacrebleu's, the word error rate is jiwer's, so figures compare
with published ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from worldtokens.errors import InputError

SCORES = {"bleu": True, "chrf": True, "wer": False, "exact": True}  # name -> more is better
WAY_OUT = "pip install 'worldtokens[metrics]'"


def text_scores(answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Figures of a whole set of answers.

    Args:
        answers: B texts.
        references: for each the texts that are right, one or more.

    Returns:
        ``bleu`` and ``chrf`` (0 to 100, over all references), ``wer`` (word errors for a word of the nearest reference,
        0 and more) and ``exact`` (share of answers equal to a reference, capitals and white space set aside).

    Raises:
        InputError: the packages that measure are not installed, or answers and references do not go together.
    """
    if len(answers) != len(references) or not answers or not all(references):
        raise InputError(
            f"{len(answers)} answers and {len(references)} lists of references: expected as many, one or more each"
        )
    try:
        import sacrebleu
    except ImportError as e:
        raise InputError(f"BLEU and chrF are sacrebleu's, which is not installed: {WAY_OUT}") from e
    most = max(map(len, references))
    columns = [[r[i] if i < len(r) else None for r in references] for i in range(most)]
    return {
        "bleu": sacrebleu.corpus_bleu(list(answers), columns).score,
        "chrf": sacrebleu.corpus_chrf(list(answers), columns).score,
        "wer": word_error_rate(answers, references),
        "exact": exact_share(answers, references),
    }


def word_error_rate(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Substituted, left out and added words of all answers for each word of their nearest references.

    Raises:
        InputError: jiwer is not installed.
    """
    try:
        import jiwer
    except ImportError as e:
        raise InputError(f"the word error rate is jiwer's, which is not installed: {WAY_OUT}") from e
    errors = words = 0
    for answer, right in zip(answers, references, strict=True):
        counted = []
        for text in right:
            n = len(text.split())
            if n:
                found = jiwer.process_words(text, answer)
                counted.append((found.substitutions + found.deletions + found.insertions, n))
            else:  # jiwer takes no empty reference: every word said is one too many
                counted.append((len(answer.split()), 0))
        best = min(counted, key=lambda c: (c[0] / max(1, c[1]), c[0]))
        errors, words = errors + best[0], words + best[1]
    return errors / max(1, words)


def exact_share(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Share of answers that are a reference, word for word; capitals and white space do not count."""

    def plain(text: str) -> str:
        return " ".join(text.casefold().split())

    hits = [plain(a) in {plain(r) for r in right} for a, right in zip(answers, references, strict=True)]
    return sum(hits) / max(1, len(hits))
