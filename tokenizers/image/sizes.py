"""Image sizes of a front-end with native aspect: pixels, from a budget of patches."""

from __future__ import annotations

import math

from worldtokens.tokenizers.patches import grid_size


def native_size(height: int, width: int, patch: tuple[int, int], max_tokens: int) -> tuple[int, int]:
    """The largest (height, width) of this aspect, at most the image's own, that `max_tokens` patches cover.

    Of all scales at which ceil(height / ph) * ceil(width / pw) stays within the budget, the largest one puts a side on
    a patch border, so it is the best over the number of rows. Sides are then rounded to whole pixels, at least 1.
    """
    ph, pw = patch
    rows, columns = grid_size((height, width), patch)
    if rows * columns <= max_tokens:
        return height, width
    _, rows, columns = max(
        (min(r * ph / height, max_tokens // r * pw / width), r, max_tokens // r)
        for r in range(1, max_tokens + 1)
    )
    scale = min(rows * ph / height, columns * pw / width)
    return (
        min(rows * ph, max(1, round(height * scale))),
        min(columns * pw, max(1, round(width * scale))),
    )


def full_size(height: int, width: int, patch: tuple[int, int], max_tokens: int) -> tuple[int, int]:
    """The (height, width) in whole patches that uses the budget up.

    The image is scaled up or down, then each side is extended to the next patch border. Equals timm's
    `get_image_size_for_seq`, whose bisection is followed.
    """

    def grid(scale: float) -> tuple[int, int]:
        rows, columns = (math.ceil(s * scale / p) for s, p in zip((height, width), patch, strict=True))
        return max(1, rows), max(1, columns)

    fits, over = 1e-6, 100.0
    while over - fits >= 1e-5:
        middle = (fits + over) / 2
        if math.prod(grid(middle)) <= max_tokens:
            fits = middle
        else:
            over = middle
    rows, columns = grid(fits)
    return rows * patch[0], columns * patch[1]
