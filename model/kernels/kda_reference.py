"""Kimi Delta Attention, the law: the recurrence token by token, plain enough to be read against the paper.

Per head, the state S [K, V] is a linear memory. At each token every key channel of it decays, the memory's
answer to the key is corrected towards the value by the step beta, and the query reads the result
(Kimi K3 technical report 2.1.1):

    S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T
    o_t = S_t^T (scale q_t)

Shape letters: B batch, T tokens, H heads, K key, V value, N documents.
"""

import torch
from torch import Tensor


def check_kda_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[list[int] | None, torch.dtype]:
    """Validate the arguments of a KDA call; return the offsets of ``cu_seqlens`` and the compute dtype.

    The compute dtype is the widest of the inputs' and at least fp32: the decay, its sums and the state are
    never narrower, since bf16 has no number between 0.9961 and 1 and a slow channel would never forget.

    Raises:
        ValueError: a shape that does not fit q and v, or ``cu_seqlens`` with more than one row, not rising
            from 0 to T.
    """
    if q.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q {tuple(q.shape)}, v {tuple(v.shape)}: must be [B, T, H, K] and [B, T, H, V]")
    batch, length, heads, key = q.shape
    value = v.shape[-1]
    documents = batch
    offsets: list[int] | None = None
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f"cu_seqlens with {batch} rows: packed documents need one row; reshape to [1, B*T]")
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 2:
            raise ValueError(
                f"cu_seqlens: shape {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype} must be [N + 1] integers"
            )
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0 or offsets[-1] != length or any(a > b for a, b in zip(offsets, offsets[1:])):
            raise ValueError(f"cu_seqlens={offsets}: must rise from 0 to the number of tokens, {length}")
        documents = len(offsets) - 1
    expected = {
        "k": (k, (batch, length, heads, key)),
        "v": (v, (batch, length, heads, value)),
        "g": (g, (batch, length, heads, key)),
        "beta": (beta, (batch, length, heads)),
    }
    if initial_state is not None:
        expected["initial_state"] = initial_state, (documents, heads, key, value)
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)} must be {shape}, to fit q and v")
    dtype = torch.float32
    for tensor in (q, k, v, g, beta):
        dtype = torch.promote_types(dtype, tensor.dtype)
    return offsets, dtype


def kda_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and final state of KDA, differentiable by autograd in every input.

    Args:
        q, k: [B, T, H, K], any float dtype. The caller normalises them.
        v: [B, T, H, V].
        g: [B, T, H, K], log decay per key channel, <= 0 (``-inf`` clears the channel); fp32 or wider.
        beta: [B, T, H], step in [0, 1].
        scale: factor on q; None is K^-0.5.
        initial_state: [B, H, K, V]; None is zeros.
        cu_seqlens: [N + 1] integers rising from 0 to T: the one row (B = 1) packs N documents and the state
            restarts at each; the states are then [N, H, K, V]. An empty document keeps its initial state.

    Returns:
        o [B, T, H, V] in v's dtype; final state [B or N, H, K, V] in fp32, or fp64 if an input is.

    Raises:
        ValueError: see `check_kda_inputs`.
    """
    offsets, dtype = check_kda_inputs(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    batch, length, heads, key = q.shape
    documents = batch if offsets is None else len(offsets) - 1
    scale = key**-0.5 if scale is None else scale
    if initial_state is None:
        state = q.new_zeros(documents, heads, key, v.shape[-1], dtype=dtype)
    else:
        state = initial_state.to(dtype)
    q, k, values, g, beta = q.to(dtype) * scale, k.to(dtype), v.to(dtype), g.to(dtype), beta.to(dtype)
    with torch.autocast(q.device.type, enabled=False):
        if offsets is None:
            o, final_state = _recurrence(q, k, values, g, beta, state)
        else:
            runs = []
            for n, (start, stop) in enumerate(zip(offsets, offsets[1:])):
                at = slice(start, stop)
                runs.append(_recurrence(q[:, at], k[:, at], values[:, at], g[:, at], beta[:, at], state[n : n + 1]))
            o = torch.cat([run[0] for run in runs], dim=1)
            final_state = torch.cat([run[1] for run in runs])
    return o.to(v.dtype), final_state


def _recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One document per row, q already scaled; all of one dtype."""
    outputs = []
    for q_t, k_t, v_t, g_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v, g, beta))):
        state = state * g_t.exp().unsqueeze(-1)
        error = v_t - torch.einsum("bhk,bhkv->bhv", k_t, state)
        state = state + torch.einsum("bhk,bhv->bhkv", k_t, beta_t.unsqueeze(-1) * error)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q_t, state))
    return torch.stack(outputs, dim=1) if outputs else v, state
