"""Image sizes with native aspect, from a budget of patches."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from worldtokens.tokenizers.image.sizes import native_size


@settings(max_examples=300, deadline=None)
@given(
    h=st.integers(1, 6000), w=st.integers(1, 6000), n=st.integers(1, 400),
    ph=st.sampled_from([1, 7, 14, 16, 32]), pw=st.sampled_from([8, 14, 16]),
)  # fmt: skip
def test_native_size_is_the_largest_that_fits_and_keeps_the_aspect(h, w, n, ph, pw):
    def count(a, b):
        return math.ceil(a / ph) * math.ceil(b / pw)

    a, b = native_size(h, w, (ph, pw), n)
    assert 1 <= a <= h and 1 <= b <= w and count(a, b) <= n
    if count(h, w) <= n:
        assert (a, b) == (h, w), "an image within the budget keeps its pixels"
        return
    # one scale for both sides, each off by half a pixel at most, or held at one pixel
    scales = [((s - 0.5) / full, (s + 0.5) / full) for s, full in ((a, h), (b, w)) if s > 1]
    low, high = max([s[0] for s in scales], default=0), min([s[1] for s in scales], default=1)
    assert low <= high + 1e-9
    # and the next larger scale would need too many patches
    assert count(high * 1.001 * h + 1, high * 1.001 * w + 1) > n
