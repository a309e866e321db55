"""The small operations in torch: the definition of correct, and what runs on CPU.

Written for few passes over memory: one reduction and as many in-place products as the formula has.
Reductions are in float32. `out` is where the result goes, and may not share memory with an input;
None makes a new tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2, last dim) + eps) * weight; x [..., D], weight broadcastable to x."""
    size = x.shape[-1]
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().mul_(1.0 / size).add_(eps).rsqrt_().to(x.dtype)
    return torch.mul(x, scale, out=out).mul_(weight)


def rope(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotates the first 2C dims of x [T, H, D], half-split; cos, sin [T, 1, C]."""
    half = cos.shape[-1]
    low, high = x[..., :half], x[..., half : 2 * half]
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_low, out_high = out[..., :half], out[..., half : 2 * half]
    torch.mul(low, cos, out=out_low)
    out_low.addcmul_(high, sin, value=-1.0)
    torch.mul(high, cos, out=out_high)
    out_high.addcmul_(low, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def silu_mul_(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2I]; overwrites its left half and returns that, [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


def attn_res(x: Tensor, blocks: Tensor, weight: Tensor, eps: float) -> Tensor:
    """sum_i p_i v_i over v = [blocks [T, n, D], x [T, D]], p = softmax of rms_norm(v_i) . weight.

    Scores and sums are float32. Source: Attention Residuals (arXiv 2603.15031).
    """
    older, newest = blocks.float(), x.float()

    def score(v: Tensor) -> Tensor:
        return torch.matmul(v, weight) * torch.rsqrt(v.square().mean(-1) + eps)

    shares = torch.cat([score(older), score(newest).unsqueeze(1)], dim=1).softmax(-1)
    mixed = torch.bmm(shares[:, None, :-1], older).squeeze(1)
    return mixed.addcmul_(newest, shares[:, -1:]).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x [T, I] times weight [O, I] transposed, plus bias [O]."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def linear_add_(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """residual [T, O] + linear(x); overwrites the residual and returns it."""
    residual.addmm_(x, weight.t())
    return residual if bias is None else residual.add_(bias)


def gelu_mul_(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, gelu in its tanh form; overwrites the left half and returns that, [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.copy_(F.gelu(gate, approximate="tanh")).mul_(up)


def situ_mul_(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta); overwrites its input.

    Source: Kimi K3's SiTU, both factors bounded.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    keep = torch.sigmoid(gate)
    gate.div_(beta).tanh_().mul_(keep).mul_(beta)
    return gate.mul_(up.div_(linear_beta).tanh_().mul_(linear_beta))
