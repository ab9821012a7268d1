"""Chunked cross-entropy against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from worldtokens.tasks.language.loss import IGNORE, token_loss


def example(n=37, d=16, v=101, ignored=(0, 5, 36), bias=True, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=g, dtype=dtype).requires_grad_()
    weight = torch.randn(v, d, generator=g, dtype=dtype).requires_grad_()
    b = torch.randn(v, generator=g, dtype=dtype).requires_grad_() if bias else None
    labels = torch.randint(v, (n,), generator=g)
    labels[list(ignored)] = IGNORE
    return hidden, weight, b, labels


def reference(hidden, weight, bias, labels, smoothing=0.0):
    return F.cross_entropy(
        F.linear(hidden, weight, bias),
        labels,
        ignore_index=IGNORE,
        reduction="sum",
        label_smoothing=smoothing,
    )


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000, None])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [(), (0, 5, 36), tuple(range(30))])
def test_equals_torch_with_its_gradients(chunk, smoothing, ignored):
    hidden, weight, bias, labels = example(ignored=ignored)
    total, count = token_loss(hidden, weight, labels, bias, chunk, smoothing)
    want = reference(hidden, weight, bias, labels, smoothing)
    assert int(count) == 37 - len(ignored)
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-5)
    parts = hidden, weight, bias
    # scaled, as a mean is
    for ours, theirs in zip(
        torch.autograd.grad(total * 0.3, parts), torch.autograd.grad(want * 0.3, parts), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_leading_axes_and_no_bias():
    hidden, weight, _, labels = example(bias=False)
    total, _ = token_loss(hidden[:36].view(3, 4, 3, 16), weight, labels[:36].view(3, 4, 3))
    torch.testing.assert_close(total, reference(hidden[:36], weight, None, labels[:36]))


def test_two_uses_of_one_head_add_up_and_a_retained_graph_allows_a_second_backward():
    hidden, weight, bias, labels = example()
    total = token_loss(hidden[:20], weight, labels[:20], bias)[0]
    total = total + 2 * token_loss(hidden[20:], weight, labels[20:], bias)[0]
    want = reference(hidden[:20], weight, bias, labels[:20]) + 2 * reference(
        hidden[20:], weight, bias, labels[20:]
    )
    total.backward(retain_graph=True)
    once = [t.grad.clone() for t in (hidden, weight, bias)]
    for ours, theirs in zip(once, torch.autograd.grad(want, (hidden, weight, bias)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    total.backward()
    for t, g in zip((hidden, weight, bias), once, strict=True):
        torch.testing.assert_close(t.grad, 2 * g)


def test_nothing_to_predict_is_zero_with_a_graph():
    hidden, weight, bias, labels = example()
    total, count = token_loss(hidden, weight, torch.full_like(labels, IGNORE), bias)
    assert float(total.detach()) == 0 and int(count) == 0
    total.backward()
    for t in (hidden, weight, bias):
        assert torch.equal(t.grad, torch.zeros_like(t))


def test_only_trainable_tensors_get_a_gradient():
    hidden, weight, bias, labels = example()
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    token_loss(hidden, weight, labels, bias)[0].backward()
    assert hidden.grad is not None and weight.grad is None and bias.grad is None
    with torch.no_grad():
        total, _ = token_loss(hidden, weight, labels, bias)
    assert not total.requires_grad
    torch.testing.assert_close(total, reference(hidden, weight, bias, labels).detach())


def test_the_full_logits_are_never_in_memory():
    """(8192, 4096) logits are 128 MB in float32; forward and backward together stay below a quarter of that."""
    from torch.profiler import ProfilerActivity, profile

    hidden, weight = torch.randn(8192, 8, requires_grad=True), torch.randn(4096, 8, requires_grad=True)
    labels = torch.randint(4096, (8192,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        token_loss(hidden, weight, labels, chunk=512)[0].backward()
    largest = max(e.cpu_memory_usage for e in seen.events())
    assert 0 < largest < 32 * 2**20


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_under_autocast_sums_are_float32(smoothing):
    hidden, weight, bias, labels = example(n=300, v=500, ignored=(3,))
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = token_loss(hidden, weight, labels, bias, 64, smoothing)
    assert total.dtype == torch.float32
    # the right answer for these bfloat16 logits
    with torch.no_grad():
        w, b = weight.bfloat16(), bias.bfloat16()
        z = F.linear(hidden.bfloat16(), w, b).float()
    want = F.cross_entropy(z, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-3)
    total.backward()
    exact = torch.autograd.grad(reference(hidden, weight, bias, labels, smoothing), (hidden, weight, bias))
    for t, g in zip((hidden, weight, bias), exact, strict=True):
        assert t.grad.dtype == torch.float32
        assert float((t.grad - g).norm() / g.norm()) < 0.02


def test_half_precision_weights_keep_their_type():
    hidden, weight, bias, labels = example(dtype=torch.bfloat16)
    total, _ = token_loss(hidden, weight, labels, bias, 8)
    total.backward()
    assert total.dtype == torch.float32 and weight.grad.dtype == torch.bfloat16


def test_wrong_shapes_raise():
    hidden, weight, bias, labels = example()
    with pytest.raises(ValueError, match="one label per token"):
        token_loss(hidden, weight, labels[1:], bias)
    with pytest.raises(ValueError, match="expected \\(V, 16\\)"):
        token_loss(hidden, weight.t(), labels, bias)
    with pytest.raises(ValueError, match="label_smoothing"):
        token_loss(hidden, weight, labels, bias, label_smoothing=1.0)
