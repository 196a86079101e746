"""The Triton kernels of the re-enactments, each beside its equivalent in plain PyTorch. Which one runs is said by `TRITON`: on a GPU Triton; elsewhere
PyTorch, unless Triton's interpreter is asked for (TRITON_INTERPRET=1), which the tests do."""
import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


# The interpreter multiplies BF16 matrices as the integers that they are stored as: there they are widened first.
WIDEN = os.environ.get("TRITON_INTERPRET") == "1"


def triton_runs(device):
    return triton is not None and (device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


if triton:

    @triton.jit
    def _rms(x, residual, gain, out, x_stride, rows_per_gain, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
        row, i = tl.program_id(0), tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + i, mask=i < width, other=0.0).to(tl.float32)
        if ADD:
            summed = (value + tl.load(residual + row * width + i, mask=i < width, other=0.0).to(tl.float32)).to(out.dtype.element_ty)
            tl.store(residual + row * width + i, summed, mask=i < width)
            value = summed.to(tl.float32)
        normed = (value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)).to(out.dtype.element_ty)
        factor = tl.load(gain + row // rows_per_gain * width + i, mask=i < width, other=0.0).to(tl.float32)
        tl.store(out + row * width + i, (normed.to(tl.float32) * factor).to(out.dtype.element_ty), mask=i < width)

    @triton.jit
    def _rope(x, out, positions, cos, sin, row_stride, head_stride, N, HALF: tl.constexpr, BLOCK: tl.constexpr):
        row, head, i = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
        inside = i < HALF
        a = tl.load(x + row * row_stride + head * head_stride + 2 * i, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + row * row_stride + head * head_stride + 2 * i + 1, mask=inside, other=0.0).to(tl.float32)
        place = tl.load(positions + row) * HALF + i
        c, s = tl.load(cos + place, mask=inside, other=0.0), tl.load(sin + place, mask=inside, other=0.0)
        to = out + (row * N + head) * 2 * HALF + 2 * i
        tl.store(to, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
        tl.store(to + 1, (b * c + a * s).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _silu_mul(x, out, width, BLOCK: tl.constexpr):
        row, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        gate = tl.load(x + row * 2 * width + i, mask=i < width, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + i, mask=i < width, other=0.0).to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + row * width + i, (gate * up).to(out.dtype.element_ty), mask=i < width)

    @triton.jit
    def _grouped_insert(latents, keys, bases, slots, n, RK: tl.constexpr, R: tl.constexpr, BLOCK_RK: tl.constexpr, BLOCK_R: tl.constexpr):
        row, layer = tl.program_id(0), tl.program_id(1)
        slot = tl.load(slots + row)
        if slot >= 0:
            base = tl.load(bases + layer).to(tl.pointer_type(latents.dtype.element_ty)) + slot * (RK + R)
            i = tl.arange(0, BLOCK_RK)
            tl.store(base + i, tl.load(latents + (layer * n + row) * RK + i, mask=i < RK), mask=i < RK)
            j = tl.arange(0, BLOCK_R)
            tl.store(base + RK + j, tl.load(keys + (layer * n + row) * R + j, mask=j < R), mask=j < R)

    @triton.jit
    def _concat_insert(q_latent, q_rope, out, z, k, cache, slots, N: tl.constexpr, RK: tl.constexpr, R: tl.constexpr, BLOCK_RK: tl.constexpr,
                       BLOCK_R: tl.constexpr):
        row, head = tl.program_id(0), tl.program_id(1)
        i, j = tl.arange(0, BLOCK_RK), tl.arange(0, BLOCK_R)
        to = out + (row * N + head) * (RK + R)
        tl.store(to + i, tl.load(q_latent + (row * N + head) * RK + i, mask=i < RK), mask=i < RK)
        tl.store(to + RK + j, tl.load(q_rope + (row * N + head) * R + j, mask=j < R), mask=j < R)
        if head == 0:
            slot = tl.load(slots + row)
            if slot >= 0:
                tl.store(cache + slot * (RK + R) + i, tl.load(z + row * RK + i, mask=i < RK), mask=i < RK)
                tl.store(cache + slot * (RK + R) + RK + j, tl.load(k + row * R + j, mask=j < R), mask=j < R)

    # Rows of one request are (t, head) pairs. A tile of 16 is one t and 16 heads: what a decode kernel does whose requests were repeated T times. A
    # tile of 64 is the folded block: the keys are read T * N / 64 times instead of T * N / 16 times.
    @triton.jit
    def _mla_split(q, cache, tables, n_keys, parts, maxima, sums, scale, n_rows, max_blocks, BLOCK_SIZE: tl.constexpr, RK: tl.constexpr,
                   R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr):
        request, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        n_splits = tl.num_programs(2)
        m = tile * BM + tl.arange(0, BM)
        c, r, j = tl.arange(0, RK), tl.arange(0, R), tl.arange(0, BN)
        rows = q + (request * n_rows + m[:, None]) * (RK + R)
        q_latent = tl.load(rows + c[None, :], mask=m[:, None] < n_rows, other=0.0)
        q_rope = tl.load(rows + RK + r[None, :], mask=m[:, None] < n_rows, other=0.0)
        if WIDE:
            q_latent, q_rope = q_latent.to(tl.float32), q_rope.to(tl.float32)
        n = tl.load(n_keys + request).to(tl.int32)
        per_split = tl.cdiv(tl.cdiv(n, n_splits), BN) * BN
        begin = split * per_split
        end = tl.minimum(begin + per_split, n)
        top = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, RK], tl.float32)
        for at in range(begin, end, BN):
            key = at + j
            block = tl.load(tables + request * max_blocks + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
            place = cache + (block * BLOCK_SIZE + key % BLOCK_SIZE)[:, None] * (RK + R)
            latent = tl.load(place + c[None, :], mask=key[:, None] < end, other=0.0)
            rope = tl.load(place + RK + r[None, :], mask=key[:, None] < end, other=0.0)
            if WIDE:
                latent, rope = latent.to(tl.float32), rope.to(tl.float32)
            scores = tl.dot(q_latent, tl.trans(latent)) + tl.dot(q_rope, tl.trans(rope))
            scores = tl.where(key[None, :] < end, scores * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp(scores - new_top[:, None])
            shrink = tl.exp(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(latent.dtype), latent)
            top = new_top
        place = (request * n_splits + split) * n_rows + m
        tl.store(parts + place[:, None] * RK + c[None, :], acc, mask=m[:, None] < n_rows)
        tl.store(maxima + place, top, mask=m < n_rows)
        tl.store(sums + place, total, mask=m < n_rows)

    @triton.jit
    def _mla_combine(parts, maxima, sums, out, n_rows, n_splits, RK: tl.constexpr):
        request, m = tl.program_id(0), tl.program_id(1)
        c = tl.arange(0, RK)
        top = float("-inf")
        for split in range(n_splits):
            top = tl.maximum(top, tl.load(maxima + (request * n_splits + split) * n_rows + m))
        total = 0.0
        acc = tl.zeros([RK], tl.float32)
        for split in range(n_splits):
            place = (request * n_splits + split) * n_rows + m
            factor = tl.exp(tl.load(maxima + place) - top)
            total += factor * tl.load(sums + place)
            acc += factor * tl.load(parts + place * RK + c)
        tl.store(out + (request * n_rows + m) * RK + c, (acc / total).to(out.dtype.element_ty))

    @triton.jit
    def _fp4(code):
        magnitude = (code & 7).to(tl.float32)
        exponent = tl.floor(magnitude * 0.5)
        value = tl.where(magnitude < 2, magnitude * 0.5, (1.0 + 0.5 * (magnitude - 2 * exponent)) * tl.exp2(exponent - 1))
        return tl.where((code & 8) != 0, -value, value)

    @triton.jit
    def _e4m3(bits):  # of scales, which have no sign
        exponent = (bits >> 3).to(tl.float32)
        mantissa = (bits & 7).to(tl.float32)
        return tl.where(exponent == 0, mantissa * 0.001953125, (1.0 + mantissa * 0.125) * tl.exp2(exponent - 7))

    @triton.jit
    def _w4a16(x, packed, scales, factors, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
               WIDE: tl.constexpr):
        o = tl.program_id(0) * BN + tl.arange(0, BN)
        m = tl.arange(0, BM)
        acc = tl.zeros([BM, BN], tl.float32)
        for at in range(0, K // 2, BK):
            pair = at + tl.arange(0, BK)
            inside = (o[:, None] < N) & (pair[None, :] < K // 2)
            codes = tl.load(packed + o[:, None].to(tl.int64) * (K // 2) + pair[None, :], mask=inside, other=0)
            scale = _e4m3(tl.load(scales + o[:, None].to(tl.int64) * (K // 16) + pair[None, :] // 8, mask=inside, other=0))
            row = (m[:, None] < M) & (pair[None, :] < K // 2)
            even = tl.load(x + m[:, None] * K + 2 * pair[None, :], mask=row, other=0.0)
            odd = tl.load(x + m[:, None] * K + 2 * pair[None, :] + 1, mask=row, other=0.0)
            low, high = (_fp4(codes) * scale).to(even.dtype), (_fp4(codes >> 4) * scale).to(odd.dtype)
            if WIDE:
                even, odd, low, high = even.to(tl.float32), odd.to(tl.float32), low.to(tl.float32), high.to(tl.float32)
            acc += tl.dot(even, tl.trans(low))
            acc += tl.dot(odd, tl.trans(high))
        acc *= tl.load(factors + o, mask=o < N, other=0.0)[None, :]
        tl.store(out + m[:, None] * N + o[None, :], acc.to(out.dtype.element_ty), mask=(m[:, None] < M) & (o[None, :] < N))


def _power_of_2(n):
    return 1 << (n - 1).bit_length()


def rms(x, gain, eps, residual=None):
    """RMSNorm of rows, whose elements stand together; gain [width], or [k, width] for k equal groups of rows. With a residual: that gets x added, and
    is what is normed."""
    rows, width = x.shape
    if triton_runs(x.device.type):
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        groups = gain.numel() // width
        _rms[(rows,)](x, x if residual is None else residual, gain, out, x.stride(0), rows // groups, width, eps, residual is not None,
                      _power_of_2(width))
        return out
    return rms_torch(x if residual is None else residual.add_(x), gain, eps)


def rms_torch(x, gain, eps):
    rows, width = x.shape
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (normed.view(-1, rows // (gain.numel() // width), width) * gain.view(-1, 1, width)).view(rows, width)


def rope(x, positions, cos, sin):
    """x [n, heads, R] turned by the tables' rows [limit, R / 2] of the positions; interleaved pairs."""
    n, n_heads, width = x.shape
    if triton_runs(x.device.type):
        out = torch.empty(n, n_heads, width, dtype=x.dtype, device=x.device)
        _rope[(n, n_heads)](x, out, positions, cos, sin, x.stride(0), x.stride(1), n_heads, width // 2, _power_of_2(width // 2))
        return out
    return rope_torch(x, positions, cos, sin)


def rope_torch(x, positions, cos, sin):
    c, s, a, b = cos[positions][:, None], sin[positions][:, None], x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2).to(x.dtype)


def silu_mul(x):
    """silu(gate) * up of rows [gate | up]."""
    rows, width = x.shape[0], x.shape[1] // 2
    if not triton_runs(x.device.type):
        return torch.nn.functional.silu(x[:, :width]) * x[:, width:]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _silu_mul[(rows, triton.cdiv(width, 1024))](x, out, width, 1024)
    return out


def grouped_insert(latents, keys, caches, bases, slots):
    """Rows of all layers into their caches: latents [L, n, Rk], keys [L, n, R], bases: addresses of the layers' caches [L]."""
    n_layers, n, rk = latents.shape
    if triton_runs(latents.device.type):
        _grouped_insert[(n, n_layers)](latents, keys, bases, slots, n, rk, keys.shape[2], _power_of_2(rk), _power_of_2(keys.shape[2]))
    else:
        for layer, cache in enumerate(caches):
            cache.view(-1, rk + keys.shape[2])[slots] = torch.cat((latents[layer], keys[layer]), 1)


def concat_insert(q_latent, q_rope, z, k, cache, slots):
    """[q_latent | q_rope] of every row and head; the rows' own [z | k] into the cache."""
    n, n_heads, rk = q_latent.shape
    if not triton_runs(q_latent.device.type):
        cache.view(-1, rk + k.shape[1])[slots] = torch.cat((z, k), 1)
        return torch.cat((q_latent, q_rope), 2)
    out = torch.empty(n, n_heads, rk + k.shape[1], dtype=q_latent.dtype, device=q_latent.device)
    _concat_insert[(n, n_heads)](q_latent, q_rope, out, z, k, cache, slots, n_heads, rk, k.shape[1], _power_of_2(rk), _power_of_2(k.shape[1]))
    return out


def mla_torch(q, cache, tables, n_keys, scale, rk):
    """Softmax attention over each request's keys: q [B, M, E], out [B, M, Rk]; einsum, FP32 softmax (P5c)."""
    block_size, width = cache.shape[1], cache.shape[2]
    most = tables.shape[1] * block_size
    index = (tables.long()[:, :, None] * block_size + torch.arange(block_size, device=q.device)).view(q.shape[0], most)
    keys = cache.view(-1, width)[index]
    scores = torch.einsum("bme,bke->bmk", q, keys).float() * scale
    scores.masked_fill_(torch.arange(most, device=q.device)[None, None, :] >= n_keys[:, None, None], float("-inf"))
    return torch.einsum("bmk,bke->bme", torch.softmax(scores, -1).to(q.dtype), keys[..., :rk])


def mla(q, cache, tables, n_keys, scale, rk, tile, n_splits=16):
    """The same by split keys; tile 16: rows flattened (P5a), 64: folded (P5b)."""
    if not triton_runs(q.device.type):
        return mla_torch(q, cache, tables, n_keys, scale, rk)
    n_requests, n_rows, width = q.shape
    parts = torch.empty(n_requests, n_splits, n_rows, rk, dtype=torch.float32, device=q.device)
    maxima = torch.empty(n_requests, n_splits, n_rows, dtype=torch.float32, device=q.device)
    sums = torch.empty_like(maxima)
    out = torch.empty(n_requests, n_rows, rk, dtype=q.dtype, device=q.device)
    _mla_split[(n_requests, triton.cdiv(n_rows, tile), n_splits)](q, cache, tables, n_keys, parts, maxima, sums, scale, n_rows, tables.shape[1],
                                                                 cache.shape[1], rk, width - rk, tile, 32, WIDEN, num_warps=4 if tile == 16 else 8,
                                                                 num_stages=2)
    _mla_combine[(n_requests, n_rows)](parts, maxima, sums, out, n_rows, n_splits, rk)
    return out


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def nvfp4_dequantise(packed, scales, factors, dtype=torch.bfloat16):
    """codes * block scales * factor of each row."""
    values = torch.tensor(E2M1, dtype=torch.float32, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), -1).view(packed.shape[0], -1).long()
    return (values[codes] * scales.float().repeat_interleave(16, 1) * factors[:, None]).to(dtype)


def w4a16(x, packed, scales, factors):
    """x [M, K] times NVFP4 weights [N, K], decoded within the kernel (P6)."""
    if not triton_runs(x.device.type):
        return torch.nn.functional.linear(x, nvfp4_dequantise(packed, scales, factors, x.dtype))
    rows, n = x.shape[0], packed.shape[0]
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    _w4a16[(triton.cdiv(n, 64),)](x, packed, scales.view(torch.uint8), factors, out, rows, n, x.shape[1], max(16, _power_of_2(rows)), 64, 64, WIDEN)
    return out
