"""Attention of generation, over the pages of the KV cache, in Triton.

``generation/triton_attention`` launches these kernels and says how bits come about. ``batch_invariant_gpu`` writes packed sequences
to pages and launches them too. :class:`TileShape` says how much a program computes at a time, and so the order of a query's sums.

Shape legend: H KV heads of this rank, G (``GROUP``) query heads per KV head, D (``DIM``) elements of a head's values, M (``BLOCK_M``)
matrix rows of a tile: queries x G, N (``BLOCK_N``) keys of a block. ``tiles`` int32 [n, 4]: first token of the step, its position,
number of queries, line of the table. ``TAIL``: elements that keys have behind their first D, where these are the values (latent
attention); 0: values have pages of their own.

A query's keys are cut twice. A split has SPLIT keys and one part of the softmax; a block is what a program loads at once::

    keys   |  0 ............... 511 | 512 ............. 1023 | 1024 ... length - 1 |
    blocks |  N  |  N  |  N  |  N   |  N  |  N  |  N  |  N   |  N  |  N            |
    splits |  part 0                |  part 1                |  part 2             |
    sum    |  (top, total, mixed) = ((part 0 + part 1) + part 2), always in this order

The state of a softmax: ``top`` [M], the largest score; ``total`` [M], the sum of 2^(score - top); ``mixed`` [M, D], the sum of
2^(score - top) times the values. ``part_top``, ``part_total``, ``part_mixed`` are those of the present split.

Strides and sizes that change from step to step do not specialise: a wider table compiles nothing anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rlhf_spmd.kernels import devices
from rlhf_spmd.kernels.layer_args import AttentionRule

MIN_ROWS = 16  # rows of a tile: tl.dot takes no fewer
SPLIT_KEYS = 512  # keys of a split: a multiple of every block of keys
BLOCK_BYTES = 1 << 14  # bytes of the keys of a block, which is loaded as a whole: 64 keys of 128 bf16
CHUNK_ROWS = 128  # matrix rows of a chunk's tile, see TileShape
LOG2_E = 1.4426950408889634


class TileShape(NamedTuple):
    """How much a program computes at a time.

    - rows: matrix rows of a tile
    - keys: keys of a block
    - elements: elements of a head, rounded up
    - warps: warps of a program
    - stages: blocks in flight
    """

    rows: int
    keys: int
    elements: int
    warps: int
    stages: int

    @classmethod
    def of(cls, head_dim: int, itemsize: int, page_size: int, rows: int) -> TileShape:
        """Return the shape for tiles of ``rows``. Blocks of fp32, whose products are no tensor cores' work, are small: a thread
        holds whole rows of both factors."""
        elements = max(triton.next_power_of_2(head_dim), 16)
        keys = min(max(BLOCK_BYTES // (elements * itemsize), 16), 64 if itemsize == 2 else 16)
        # two blocks arrive while one is computed; where each waits for the numbers of its pages, these are a step of their own
        stages = 2 if elements * itemsize > 1024 else 5 if page_size % keys else 3  # an A100's shared memory holds no more
        return cls(rows, keys, elements, 8 if rows >= 32 or elements > 256 else 4, stages)

    @classmethod
    def of_singles(cls, head_dim: int, itemsize: int, page_size: int, group_size: int) -> TileShape:
        return cls.of(head_dim, itemsize, page_size, tile_rows(group_size))

    @classmethod
    def of_chunks(
        cls, head_dim: int, itemsize: int, page_size: int, group_size: int, chunk_rows: int | None = None
    ) -> TileShape:
        """Return the shape for chunks of prompts. It has at most CHUNK_ROWS rows, fewer where a tile's two sums, of a split and of
        all, would not fit into registers, or the tile not into shared memory."""
        max_rows = min(CHUNK_ROWS, 32 if itemsize > 2 or head_dim > 256 else 64 if head_dim > 128 else 128)
        rows = max(chunk_rows or max_rows, tile_rows(group_size))
        while (shape := cls.of(head_dim, itemsize, page_size, rows)).shared_bytes(itemsize) > devices.shared_memory():
            if rows == MIN_ROWS:
                room = devices.shared_memory() >> 10
                raise ValueError(f"head_dim={head_dim} in {itemsize} bytes needs more shared memory than this GPU's {room} KiB")
            rows = max(rows // 2, MIN_ROWS)
        return shape

    @classmethod
    def of_invariant_chunks(cls, head_dim: int, itemsize: int, page_size: int, group_size: int) -> TileShape:
        """Return the shape for chunks whose queries must have the bits of single tokens.

        It keeps the instructions, and the warps for the keys of a block. Tensor cores allow twice as many rows: four warps
        then still lie side by side along the keys.
        """
        narrow = cls.of_singles(head_dim, itemsize, page_size, group_size)
        return narrow._replace(rows=32) if itemsize == 2 and head_dim <= 128 and narrow.rows == 16 else narrow

    def shared_bytes(self, itemsize: int) -> int:
        """Return an upper bound of a program's shared memory in bytes: queries, blocks of keys and values in flight, a block's
        weights where several warps share their rows, page numbers."""
        blocks = 1 if self.stages == 2 else 2
        weights = self.keys if self.warps * 16 > self.rows else 0
        return itemsize * (self.rows * (self.elements + weights) + 2 * blocks * self.keys * self.elements) + 1024

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}


def tile_rows(group_size: int) -> int:
    """Return the fewest rows of a tile that has all query heads of a KV head."""
    return max(triton.next_power_of_2(group_size), 16)


def score_factors(rule: AttentionRule) -> tuple[float, float]:
    """Return ``scale`` and ``cap`` of the kernels, which compute powers of two in place of exp."""
    if rule.softcap is None:
        return rule.scale * LOG2_E, 0.0
    return rule.scale / rule.softcap, rule.softcap * LOG2_E


@triton.jit(do_not_specialize=["table_stride"])
def locate_rows(
    positions: tl.tensor, table: tl.tensor, slots: tl.tensor, arrived: tl.tensor, table_stride: tl.tensor, heads: tl.tensor,
    PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
) -> None:  # fmt: skip
    """Write the slot of each row's token, and clear its counters."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    page = tl.load(table + row * table_stride + position // PAGE).to(tl.int64)
    tl.store(slots + row, page * PAGE + position % PAGE)
    head = tl.arange(0, BLOCK_H)
    tl.store(arrived + row * heads + head, tl.zeros([BLOCK_H], tl.int32), mask=head < heads)


@triton.jit
def write(
    k: tl.tensor, v: tl.tensor, pages: tl.tensor, slots: tl.tensor, k_stride: tl.tensor, k_head: tl.tensor,
    v_stride: tl.tensor, v_head: tl.tensor, head_elements: tl.tensor, heads: tl.tensor, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Write the keys and values of tokens [T, H, D] to their slots in the pages."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    mask = d < DIM
    target = pages + tl.load(slots + token) * DIM + d
    tl.store(target + head * head_elements, tl.load(k + token * k_stride + head * k_head + d, mask=mask), mask=mask)
    tl.store(target + (head + heads) * head_elements, tl.load(v + token * v_stride + head * v_head + d, mask=mask), mask=mask)


@triton.jit
def _empty(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr) -> tl.tensor:
    """Return a part of a softmax without keys: largest scores, sums of exponentials, weighted values."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return top, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def _add(
    top: tl.tensor, total: tl.tensor, mixed: tl.tensor, other_top: tl.tensor, other_total: tl.tensor, other_mixed: tl.tensor
) -> tl.tensor:
    """Return the sum of two parts of a softmax. One without keys adds exactly 0."""
    new_top = tl.maximum(top, other_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    scale, other_scale = tl.exp2(top - base), tl.exp2(other_top - base)
    total = total * scale + other_total * other_scale
    mixed = mixed * scale[:, None] + other_mixed * other_scale[:, None]
    return new_top, total, mixed


@triton.jit
def _with_sinks(top: tl.tensor, total: tl.tensor, sinks: tl.tensor, heads: tl.tensor, SINKS: tl.constexpr) -> tl.tensor:
    """Return the sums of exponentials with those of the ``sinks`` fp32 [H * G], whose values are 0."""
    if SINKS:
        total += tl.exp2(tl.load(sinks + heads) * 1.4426950408889634 - top)
    return total


@triton.jit
def _page(line: tl.tensor, block: tl.tensor, length: tl.tensor, PAGE: tl.constexpr, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Return the page in which a block of keys lies, if it does not span several. It is carried from block to block: loads whose
    addresses wait for another load of the same turn are pipelined half as deep."""
    page = tl.full([], 0, tl.int32)
    if PAGE % BLOCK_N == 0:
        page = tl.load(line + block // PAGE, mask=block < length, other=0)
    return page


@triton.jit
def _locate(
    line: tl.tensor, page: tl.tensor, block: tl.tensor, length: tl.tensor, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """Return slots of the keys of a block: one as int64 and the distances [N] of the keys from it."""
    n = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:
        first = page.to(tl.int64) * PAGE + block % PAGE
        distance = n
    else:
        key = block + n
        first = tl.full([], 0, tl.int64)
        distance = tl.load(line + key // PAGE, mask=key < length, other=0).to(tl.int64) * PAGE + key % PAGE
    return first, distance


@triton.jit
def _load(source: tl.tensor, written: tl.tensor, in_head: tl.tensor, MASKED: tl.constexpr, PADDED: tl.constexpr) -> tl.tensor:
    """Return elements of keys or values, 0 where nothing was ``written`` or outside of the head; masks only where they are needed."""
    if MASKED and PADDED:
        x = tl.load(source, mask=written & in_head, other=0.0)
    elif MASKED:
        x = tl.load(source, mask=written, other=0.0)
    elif PADDED:
        x = tl.load(source, mask=in_head, other=0.0)
    else:
        x = tl.load(source)
    return x


@triton.constexpr_function
def _tail_block(tail: int) -> int:
    return max(triton.next_power_of_2(tail), 16)


@triton.jit
def _extra_query_elements(x: tl.tensor, x_at: tl.tensor, real: tl.tensor, DIM: tl.constexpr, TAIL: tl.constexpr) -> tl.tensor:
    """Return the elements of the queries behind the first D; without such elements ``x``, which nobody reads."""
    tail = x
    if TAIL > 0:
        t = tl.arange(0, _tail_block(TAIL))
        tail = tl.load(x_at + (DIM + t)[None, :], mask=real[:, None] & (t < TAIL)[None, :], other=0.0)
    return tail


@triton.jit
def _attend_block(
    x: tl.tensor, x_tail: tl.tensor, top: tl.tensor, total: tl.tensor, mixed: tl.tensor, block: tl.tensor, page: tl.tensor,
    keys_at: tl.tensor, values_at: tl.tensor, line: tl.tensor, length: tl.tensor, position: tl.tensor, scale: tl.tensor, cap: tl.tensor,
    MASKED: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, TAIL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the part of the softmax, and the keys of a block. Without ``MASKED`` every query sees all of these keys. ``scale`` and
    ``cap`` are those of scores in powers of two."""
    WIDTH: tl.constexpr = DIM + TAIL
    d = tl.arange(0, BLOCK_D)
    mask = d < DIM
    key = block + tl.arange(0, BLOCK_N)
    written = key < length
    first, distance = _locate(line, page, block, length, PAGE, BLOCK_N)
    keys = keys_at + first * WIDTH + (distance[None, :] * WIDTH + d[:, None])
    k = _load(keys, written[None, :], mask[:, None], MASKED, DIM != BLOCK_D)
    scores = tl.dot(x, k, input_precision="ieee")
    if TAIL > 0:
        t = tl.arange(0, _tail_block(TAIL))
        tails = keys_at + first * WIDTH + (distance[None, :] * WIDTH + (DIM + t)[:, None])
        tail = _load(tails, written[None, :], (t < TAIL)[:, None], MASKED, True)
        scores = tl.dot(x_tail, tail, scores, input_precision="ieee")
    scores = scores * scale
    if CAPPED:
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634)) + 1.0))  # tanh
    if MASKED:
        visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(p, 1)
    if TAIL > 0:
        v = tl.trans(k)
    else:
        values = values_at + first * DIM + (distance[:, None] * DIM + d[None, :])
        v = _load(values, written[:, None], mask[None, :], MASKED, DIM != BLOCK_D)
    mixed = tl.dot(p.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
    return new_top, total, mixed


@triton.jit
def _walk(
    x: tl.tensor, x_tail: tl.tensor, top: tl.tensor, total: tl.tensor, mixed: tl.tensor, part_top: tl.tensor, part_total: tl.tensor,
    part_mixed: tl.tensor, first: tl.tensor, last: tl.tensor, page: tl.tensor, keys_at: tl.tensor, values_at: tl.tensor,
    line: tl.tensor, length: tl.tensor, position: tl.tensor, scale: tl.tensor, cap: tl.tensor, MASKED: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, TAIL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the sum and the part after keys ``first`` .. ``last``. Keys join the part of their split; the part joins the sum when
    the next split begins. ``page``: the page of the first block."""
    for block in range(first, last, BLOCK_N):
        next_page = _page(line, block + BLOCK_N, length, PAGE, BLOCK_N)
        if block % SPLIT == 0:
            top, total, mixed = _add(top, total, mixed, part_top, part_total, part_mixed)
            part_top, part_total, part_mixed = _empty(BLOCK_M, BLOCK_D)
        part_top, part_total, part_mixed = _attend_block(
            x, x_tail, part_top, part_total, part_mixed, block, page, keys_at, values_at, line, length, position, scale, cap,
            MASKED, PAGE, DIM, TAIL, WINDOW, CAPPED, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        page = next_page
    return top, total, mixed, part_top, part_total, part_mixed, page


@triton.jit(do_not_specialize=["table_stride", "tokens"])
def attend_chunks(
    q: tl.tensor, pages: tl.tensor, out: tl.tensor, log_sums: tl.tensor, sinks: tl.tensor, tiles: tl.tensor, table: tl.tensor,
    q_stride: tl.tensor, q_head: tl.tensor, head_elements: tl.tensor, table_stride: tl.tensor, kv_heads: tl.tensor,
    tokens: tl.tensor, scale: tl.tensor, cap: tl.tensor, LOGS: tl.constexpr, SINKS: tl.constexpr, GROUP: tl.constexpr,
    PAGE: tl.constexpr, DIM: tl.constexpr, TAIL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of one KV head; grid [tiles * H * ceil(G / M)].

    Three walks: the window's first blocks with masks, the keys that all queries see without masks, the diagonal with masks.
    LOGS: the scores' log-sum-exps go to ``log_sums`` fp32 [H * G, tokens].
    """
    PARTS_OF_G: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    tile = tiles + tl.program_id(0) // (kv_heads * PARTS_OF_G) * 4
    part = tl.program_id(0) % (kv_heads * PARTS_OF_G)
    head = (part // PARTS_OF_G).to(tl.int64)
    token = tl.load(tile).to(tl.int64)
    start = tl.load(tile + 1)
    count = tl.load(tile + 2)
    line = table + tl.load(tile + 3).to(tl.int64) * table_stride
    length = start + count
    row = part % PARTS_OF_G * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // GROUP
    position = start + tl.minimum(query, count - 1)
    heads = head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    mask = (query < count)[:, None] & (d < DIM)[None, :]
    x_at = q + (token + query)[:, None] * q_stride + heads[:, None] * q_head
    x = tl.load(x_at + d[None, :], mask=mask, other=0.0)
    x_tail = _extra_query_elements(x, x_at, query < count, DIM, TAIL)
    keys_at = pages + head * head_elements
    values_at = pages + (head + kv_heads) * head_elements
    top, total, mixed = _empty(BLOCK_M, BLOCK_D)
    part_top, part_total, part_mixed = _empty(BLOCK_M, BLOCK_D)
    begin = start * 0
    if WINDOW > 0:
        begin = tl.maximum(start - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    page = _page(line, begin, length, PAGE, BLOCK_N)
    if WINDOW > 0:
        window_end = tl.minimum(tl.cdiv(tl.maximum(length - WINDOW, 0), BLOCK_N) * BLOCK_N, length)
        top, total, mixed, part_top, part_total, part_mixed, page = _walk(
            x, x_tail, top, total, mixed, part_top, part_total, part_mixed, begin, window_end, page, keys_at, values_at, line, length,
            position, scale, cap, True, PAGE, DIM, TAIL, WINDOW, CAPPED, SPLIT, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        begin = tl.maximum(begin, window_end)
    diagonal = tl.maximum((start + 1) // BLOCK_N * BLOCK_N, begin)
    top, total, mixed, part_top, part_total, part_mixed, page = _walk(
        x, x_tail, top, total, mixed, part_top, part_total, part_mixed, begin, diagonal, page, keys_at, values_at, line, length,
        position, scale, cap, False, PAGE, DIM, TAIL, WINDOW, CAPPED, SPLIT, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    top, total, mixed, part_top, part_total, part_mixed, page = _walk(
        x, x_tail, top, total, mixed, part_top, part_total, part_mixed, diagonal, length, page, keys_at, values_at, line, length,
        position, scale, cap, True, PAGE, DIM, TAIL, WINDOW, CAPPED, SPLIT, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    top, total, mixed = _add(top, total, mixed, part_top, part_total, part_mixed)
    total = _with_sinks(top, total, sinks, heads, SINKS)
    result_at = (token + query)[:, None] * (kv_heads * GROUP * DIM) + heads[:, None] * DIM + d[None, :]
    tl.store(out + result_at, mixed / total[:, None], mask=mask)
    if LOGS:
        log_sum = (top + tl.log2(total)) * 0.6931471805599453
        tl.store(log_sums + heads * tokens + token + query, log_sum, mask=query < count)


@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def attend_singles(
    q: tl.tensor, pages: tl.tensor, out: tl.tensor, parts: tl.tensor, arrived: tl.tensor, positions: tl.tensor,
    sinks: tl.tensor, tiles: tl.tensor, table: tl.tensor, q_stride: tl.tensor, q_head: tl.tensor, head_elements: tl.tensor,
    table_stride: tl.tensor, kv_heads: tl.tensor, num_splits: tl.tensor, scale: tl.tensor, cap: tl.tensor,
    TILED: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    TAIL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Compute every S-th split of a row and a tile of a KV head's queries; grid [rows, H * ceil(G / M), S]. Programs that share a tile
    store a part per split in ``parts`` fp32 [rows, H * G, splits, D + 2] and count themselves in ``arrived`` int32 [rows, tiles]. The
    last one adds the parts up in their order and clears the counter. Without ``TILED`` a row's token and line are its number."""
    PARTS_OF_G: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    number = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) // PARTS_OF_G).to(tl.int64)
    if TILED:
        token = tl.load(tiles + number * 4).to(tl.int64)
        start = tl.load(tiles + number * 4 + 1)
        line = table + tl.load(tiles + number * 4 + 3).to(tl.int64) * table_stride
    else:
        token = number
        start = tl.load(positions + number).to(tl.int32)
        line = table + number * table_stride
    length = start + 1
    oldest = start * 0
    if WINDOW > 0:
        oldest = tl.maximum(start - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    first, last = oldest // SPLIT, tl.cdiv(length, SPLIT)
    sharing = tl.minimum(last - first, tl.num_programs(2))
    if tl.program_id(2) >= sharing:
        return
    row = tl.program_id(1) % PARTS_OF_G * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < GROUP
    heads = head * GROUP + tl.minimum(row, GROUP - 1)
    d = tl.arange(0, BLOCK_D)
    mask = real[:, None] & (d < DIM)[None, :]
    x_at = q + token * q_stride + heads[:, None] * q_head
    x = tl.load(x_at + d[None, :], mask=mask, other=0.0)
    x_tail = _extra_query_elements(x, x_at, real, DIM, TAIL)
    keys_at = pages + head * head_elements
    values_at = pages + (head + kv_heads) * head_elements
    part_at = parts + (number * kv_heads * GROUP + heads) * num_splits * (DIM + 2)
    position = start + row * 0
    writes_result = sharing == 1
    top, total, mixed = _empty(BLOCK_M, BLOCK_D)
    for split in range(first + tl.program_id(2), last, tl.num_programs(2)):
        part_top, part_total, part_mixed = _empty(BLOCK_M, BLOCK_D)
        begin = tl.maximum(split * SPLIT, oldest)
        page = _page(line, begin, length, PAGE, BLOCK_N)
        for block in range(begin, tl.minimum((split + 1) * SPLIT, length), BLOCK_N):
            next_page = _page(line, block + BLOCK_N, length, PAGE, BLOCK_N)
            part_top, part_total, part_mixed = _attend_block(
                x, x_tail, part_top, part_total, part_mixed, block, page, keys_at, values_at, line, length, position, scale, cap,
                True, PAGE, DIM, TAIL, WINDOW, CAPPED, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            page = next_page
        if PARTS:  # noqa: SIM102 - known to the compiler, unlike what follows
            if sharing > 1:
                target = part_at + split * (DIM + 2)
                tl.store(target[:, None] + d[None, :], part_mixed, mask=mask)
                tl.store(target + DIM, part_top, mask=real)
                tl.store(target + DIM + 1, part_total, mask=real)
        top, total, mixed = _add(top, total, mixed, part_top, part_total, part_mixed)
    if PARTS:  # noqa: SIM102 - as above
        if sharing > 1:
            tl.debug_barrier()  # all threads have stored their parts before one of them counts
            counter = arrived + number * tl.num_programs(1) + tl.program_id(1)
            writes_result = tl.atomic_add(counter, 1, sem="acq_rel") == sharing - 1
            if writes_result:
                tl.store(counter, 0)
                top, total, mixed = _empty(BLOCK_M, BLOCK_D)
                for split in range(first, last):
                    target = part_at + split * (DIM + 2)
                    part_top = tl.load(target + DIM, mask=real, other=0.0, cache_modifier=".cg")
                    part_total = tl.load(target + DIM + 1, mask=real, other=1.0, cache_modifier=".cg")
                    part_mixed = tl.load(target[:, None] + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
                    top, total, mixed = _add(top, total, mixed, part_top, part_total, part_mixed)
    total = _with_sinks(top, total, sinks, heads, SINKS)
    result_at = token * (kv_heads * GROUP * DIM) + heads[:, None] * DIM + d[None, :]
    tl.store(out + result_at, mixed / total[:, None], mask=mask & writes_result)
