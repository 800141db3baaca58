"""Linear layers that multiply with weights laid out once for oneDNN or FBGEMM, on a CPU.

torch's own product of a few rows reorders the weight in each call, or multiplies in an unsuitable layout. With weights
reordered once, a block of guesses costs little more than reading them. The user's model is not changed: blocks run on a
weight-sharing shadow model whose plain `nn.Linear` layers are `PackedLinear`, and so do prompts where the copies are
faster for them, too.

FBGEMM's copies are in float16 (`lade.forward.cpu.fp16_weights`). oneDNN's, in the weights' dtype, are of bfloat16 where
the processor has instructions for it but no AMX, and of float32 that float16 does not hold.

A model is packed once its calls are long enough to pay for it. The copies are shared by its calls and freed with it.
Before each call that uses them, checksums show whether the weights have changed since: a write through `weight.data`,
such as merging an adapter, changes neither the address nor the version counter of a parameter.

Source: the operators that torch.compile's freezing uses, `mkldnn::_reorder_linear_weight` and
`mkldnn::_linear_pointwise`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import gcd, inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lade.common.compat import HOOKS
from lade.common.notices import notify, notify_once
from lade.common.processor import FP16, has_fast_products, has_slow_mkl, packing_is_needless
from lade.common.state import PerModel
from lade.common.tolerance import largest_difference, largest_value
from lade.common.trial import Trial, is_out_of_memory
from lade.forward.base import BlockCall
from lade.forward.cpu.fp16_weights import SCALED_BYTES, Fp16Weight, pack_fp16, packs_fp16
from lade.forward.cpu.free_memory import free_bytes
from lade.models.base import ModelAdapter

ONEDNN_DTYPES = (torch.float32, torch.bfloat16)
LEAST_ELEMENTS = 3 << 15  # of a weight that pays: below this, a call costs more than it gains; oneDNN's bfloat16 always
# Rows of an input: beyond, oneDNN's layout matters little. Each number of rows up to this is compared with torch's own.
MOST_ROWS = 128
MOST_FP32_ROWS = 512  # likewise, of float16 copies in float32, beyond which MKL is as fast or faster
PACKED_FOR = 16  # rows that the layout is chosen for
# New tokens that calls must have generated or asked for before their model is packed, which costs ten to thirty plain
# steps. Each change of the weights doubles it, so that a training loop does not pack for nothing.
TOKENS_BEFORE_PACKING, MOST_DOUBLINGS = 64, 4
FIRST_TOKENS = 8  # generated before it in a call: an answer that ends at once does not pay for packing
PACKING_STEPS = 6  # of an answer, over which its packing is spread, so that none of them waits for all of it
# In 16 bits packing costs some fifty plain steps, and prompts gain most by it: it comes before a prompt that pays for
# it alone, or once calls, or an answer, have had so many tokens that it takes a small part of their time.
PROMPT_BEFORE_FP16, TOKENS_BEFORE_FP16 = 192, 512
LEAST_NEW_TOKENS = 4  # of a call: comparing the weights, and making the shadow model, cost up to a plain step
LARGE_BYTES = 1 << 29  # of copies whose making is said
# The share of free memory that the copies may take.
COMFORTABLE_SHARE, LARGEST_SHARE = 0.5, 0.9
# A product whose bits must agree is compared on random inputs until so many elements have been seen, but not more often
# than this. Within rounding once is enough, with so many of its columns.
COMPARED_ELEMENTS, MOST_COMPARISONS, COMPARED_COLUMNS = 1 << 15, 64, 512
PRODUCT_TOLERANCE = 1e-5  # of a float32 product, relative to the largest element
MOST_SUMMED = 511  # words of 8 bytes that go into one checksum
SUMMED_AT_ONCE = 16  # of these; torch's sum of more of them reads half as fast

PackedCopy = Tensor | Fp16Weight


def multiply(input: Tensor, packed: PackedCopy, bias: Tensor | None) -> Tensor:
    """input @ weight.T + bias. input: [..., K]. packed: of `pack` or `pack_fp16`. Returns [..., N]."""
    if isinstance(packed, Fp16Weight):
        return packed.multiply(input, bias)
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


def pack(weight: Tensor) -> Tensor:
    """A weight [N, K] in oneDNN's opaque layout."""
    with torch.inference_mode(False), torch.no_grad():  # other calls may be in another mode
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR)


@dataclass(slots=True)
class PackedWeight:
    """The packed copy of a weight, and what reveals a change of it.

    Without references to the weight, even weak ones, with which `torch.utils.swap_tensors` refuses to work.
    """

    identity: Hashable = None
    checksums: Tensor | None = None
    packed: PackedCopy | None = None  # None if it was not made yet, memory was short, or no library takes the weight
    num_bytes: int = 0  # of the copy
    is_refused: bool = False  # by the libraries

    def note(self, weight: Tensor) -> None:
        """Remember a weight's present state."""
        self.identity, self.checksums = identity(weight), checksums(weight)

    def fill(self, weight: Tensor, fp16: Fp16Weight | None) -> None:
        """Keep the copy of a weight. fp16: the one in float16; without it oneDNN makes one, if it can."""
        if fp16 is not None:
            self.packed, self.num_bytes = fp16, weight.numel() * torch.half.itemsize
        elif onednn_error(weight.dtype) is None:
            self.packed, self.num_bytes = pack(weight), weight.nbytes
        self.is_refused = self.packed is None

    def is_current(self, weight: Tensor) -> bool:
        """Whether a weight is unchanged since it was packed, or was not for want of memory."""
        if self.checksums is None:
            return True
        return identity(weight) == self.identity and torch.equal(checksums(weight), self.checksums)


@dataclass
class ModelCopies:
    """Packed copies and verdicts that the calls of a model share."""

    copies: dict[int, PackedWeight] = field(default_factory=dict)  # by the weights' ids
    trial: Trial = field(default_factory=Trial)
    num_tokens: int = 0  # that count for packing, since the weights last changed
    num_changes: int = 0  # times that weights were found changed
    is_due: bool = False  # whether the next call packs, whatever its length
    is_planned: bool = False  # whether calls have gone through all weights
    lock: threading.Lock = field(default_factory=threading.Lock)

    def drop(self) -> None:
        """Free the copies once no call uses them."""
        with self.lock:
            self.copies, self.is_planned = {}, False

    def current(self, weights: Sequence[nn.Parameter]) -> dict[int, PackedWeight]:
        """The copies of these weights in their present state, and places for those that are missing. Others go."""
        with self.lock:
            known = {id(weight): self.copies[id(weight)] for weight in weights if id(weight) in self.copies}
            kept = {
                id(weight): copy for weight in weights if (copy := known.get(id(weight))) and copy.is_current(weight)
            }
            if len(kept) < len(known):
                self.num_changes, self.num_tokens, self.is_planned = self.num_changes + 1, 0, False
            self.copies = {id(weight): kept.get(id(weight)) or PackedWeight() for weight in weights}
            return dict(self.copies)


_copies: PerModel[ModelCopies] = PerModel(ModelCopies)
copies_of = _copies.of


def held_bytes() -> tuple[int, int]:
    """The number of weights that this process has packed, over all models, and the bytes of their copies."""
    copies = [copy for shared in _copies.all() for copy in list(shared.copies.values()) if copy.packed is not None]
    return len(copies), sum(copy.num_bytes for copy in copies)


class Packing:
    """The packed weights of one call."""

    def __init__(self, call: BlockCall, weights: list[nn.Parameter], is_asked: bool) -> None:
        """weights: to pack, largest first. is_asked: at once, whatever the call's length."""
        self.call, self.weights, self.is_asked = call, weights, is_asked
        self.is_exact, self.dtype = call.adapter.is_exact, call.adapter.dtype
        self.is_fp16, self.packs_prompts = packs_fp16(self.dtype), packs_prompts(call.adapter)
        self._num_prompt = call.num_prompt if self.packs_prompts else 0
        self.has_same_bits = not (self.is_exact or self.is_fp16)  # as torch's own products
        self.shared = copies_of(call.adapter.model)
        self._first_length: int | None = None
        self._num_refused = 0  # weights, for want of memory
        self.copies = self.shared.current(weights)
        # By the weights' ids. Other calls that run meanwhile change neither these nor when they are made.
        self.packed: dict[int, PackedCopy] = {}
        # Weights to go through yet, each with the copy to make, if any; None before the first.
        self._to_come: list[tuple[nn.Parameter, PackedWeight | None]] | None = None
        self._num_before = self.shared.num_tokens
        num_doublings = min(self.shared.num_changes, MOST_DOUBLINGS)
        self._least_tokens = (TOKENS_BEFORE_FP16 if self.packs_prompts else TOKENS_BEFORE_PACKING) << num_doublings
        self._least_prompt = PROMPT_BEFORE_FP16 << num_doublings
        pays = self._num_before >= self._least_tokens or self._num_prompt >= self._least_prompt
        if is_asked or self.shared.is_planned or self.shared.is_due or pays:
            self._pack()

    @property
    def is_planned(self) -> bool:
        """Whether the call has gone through all weights."""
        return self._to_come == []

    @property
    def kind(self) -> tuple[str, ...]:
        """The kind of the steps to come, for what they cost: empty unless weights are packed.

        Where packed products have torch's bits, the text must not depend on the free memory, so nor may the costs.
        """
        if not self.is_planned:
            return ()
        if isinstance(next(iter(self.packed.values()), None), Fp16Weight):
            return (FP16,)
        return ("packed",) if self.has_same_bits or self.packed else ()

    @property
    def serves_prompt(self) -> bool:
        """Whether the prompt is multiplied with the copies, too."""
        return (self.packs_prompts or has_slow_mkl()) and self.kind == (FP16,)

    def begin_step(self, length: int) -> None:
        """Pack a part of the model before a step, if calls are long enough to pay for it.

        length: tokens of the text so far.
        """
        if self._first_length is None:
            self._first_length = length
        num_generated = (length - self._first_length) * self.call.num_rows
        if self.packs_prompts:  # otherwise the next call packs, before its prompt
            pays = num_generated >= self._least_tokens
        else:
            pays = num_generated >= FIRST_TOKENS and self._num_before + self.call.num_new >= self._least_tokens
        if pays and not self.is_planned:
            self._pack(sum(weight.nbytes for weight in self.weights) / PACKING_STEPS)

    def _pack(self, most_bytes: float = inf) -> None:
        """Pack the weights that are not yet, as far as memory allows. most_bytes: to go through in this step."""
        if self._to_come is None:
            self._to_come = self._chosen()
        some = []
        while self._to_come and most_bytes > 0:
            weight, copy = self._to_come.pop(0)
            most_bytes -= weight.nbytes  # of those without, too: the steps must not depend on the free memory
            if copy is not None:
                some.append((weight, copy))
        with self.shared.lock:
            some = [(weight, copy) for weight, copy in some if copy.packed is None]  # or another call was faster
            try:
                found = pack_fp16([weight for weight, _ in some]) if self.is_fp16 else [None] * len(some)
                for (weight, copy), fp16 in zip(some, found, strict=True):
                    copy.fill(weight, fp16)
            except Exception as error:  # memory that was free is gone, or in pieces
                if not is_out_of_memory(error):
                    raise
                for _, copy in some:
                    copy.is_refused = copy.packed is None
        if self.is_planned:
            self.shared.is_planned, self.shared.is_due = True, False
        elif self.packs_prompts:
            return  # a packed weight may change a text: all begin in one step
        self.packed = {key: copy.packed for key, copy in self.copies.items() if copy.packed is not None}

    def _chosen(self) -> list[tuple[nn.Parameter, PackedWeight | None]]:
        """All weights, each with the copy to make; None where there is one, or memory is short."""
        copies = [(weight, self.copies[id(weight)]) for weight in self.weights]
        missing = sum(weight.nbytes for weight, copy in copies if copy.packed is None and not copy.is_refused)
        room = self._free_room(missing) if missing else 0.0
        chosen: list[tuple[nn.Parameter, PackedWeight | None]] = []
        with self.shared.lock:
            for weight, copy in copies:
                is_missing, fits = copy.packed is None and not copy.is_refused, weight.nbytes <= room
                if is_missing:
                    copy.note(weight)  # before it is packed; whether a change shows must not depend on the free memory
                    room -= weight.nbytes if fits else 0
                    self._num_refused += not fits
                chosen.append((weight, copy if is_missing and fits else None))
        return chosen

    def _free_room(self, missing: int) -> float:
        """Bytes that further copies may take, in the dtype of the weights. missing: bytes of the weights to pack."""
        free, share = free_bytes(), LARGEST_SHARE if self.is_asked else COMFORTABLE_SHARE
        _, held = held_bytes()  # by earlier calls, which have had their share
        room = inf if free is None else (free + held) * share - held
        if self.is_fp16:  # whose scaled weights need memory for a while, and FBGEMM crashes without
            room -= min(SCALED_BYTES, missing * torch.float32.itemsize // self.dtype.itemsize)
        if free is None and not self.is_asked:
            self._note("how much memory is free is not known (PACK=1 packs all the same)")
            return 0.0
        if missing > room and self.packs_prompts:
            notify_once("too little memory is free to pack the weights; texts may differ from those with packed ones")
            return 0.0  # all or none, since a packed weight may change a text
        if LARGE_BYTES <= missing <= room:
            size = missing / 1e9
            notify("packing %.1f GB of weights, once per model (PACK=0 switches it off, LADE_QUIET=1 this line)", size)
        return room

    def _note(self, reason: str) -> None:
        self.call.stats.reasons.setdefault("packed", reason)

    def close(self, num_generated: int) -> None:
        """Record what was packed and why not more. num_generated: tokens of the call."""
        shared, stats = self.shared, self.call.stats
        with shared.lock:
            shared.num_tokens += num_generated + self._num_prompt
        stats.packed_weights = len(self.packed)
        stats.packed_bytes = sum(self.copies[key].num_bytes for key in self.packed)
        if self._num_refused:
            free = (free_bytes() or 0) >> 20
            self._note(
                f"{self._num_refused} weights are not packed: too little of the {free} MiB of free memory would be left"
            )
        if num_refused := sum(copy.is_refused for copy in self.copies.values()):
            self._note(
                f"{num_refused} weights are not packed: float16 does not hold them, oneDNN is not there, or memory ran out"
            )
        if not self.is_planned:
            or_prompt = f", or before a prompt of {self._least_prompt}" if self.packs_prompts else ""
            self._note(f"packing pays from {self._least_tokens} tokens on{or_prompt}")
        if shared.trial.refusal:
            self._note(shared.trial.refusal)

    def is_same(self, found: Tensor, expected: Tensor) -> bool:
        """Whether a product agrees with torch's own: within rounding, or bit for bit where that can be, so that no text
        depends on whether there was memory to pack.
        """
        if self.has_same_bits:
            return torch.equal(found.view(torch.int16), expected.view(torch.int16))
        tolerance = PRODUCT_TOLERANCE if self.is_exact else torch.finfo(self.dtype).eps
        return largest_difference(found, expected) <= tolerance * largest_value(expected)


class PackedLinear(nn.Linear):
    """Replaces an `nn.Linear` in a shadow model."""

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., K]. Returns [..., N]."""
        packing: Packing = self.__dict__["packing"]
        packed = packing.packed.get(self.__dict__["key"])
        if packed is None or not self._is_served(input, packing, packed):
            return linear(input, self.weight, self.bias)
        return multiply(input, packed, self.bias)

    def _is_served(self, input: Tensor, packing: Packing, packed: PackedCopy) -> bool:
        """Whether the packed product of such an input may replace torch's. Compared at the first use of a shape."""
        num_rows = input.numel() // max(1, self.in_features)
        if num_rows == 0 or input.dtype != packing.dtype or input.shape[-1] != self.in_features:
            return False
        if not packing.packs_prompts and num_rows > MOST_FP32_ROWS:
            return False
        if not isinstance(packed, Fp16Weight) and (num_rows > MOST_ROWS or not input.is_contiguous()):
            return False  # for an input that is not contiguous, torch rounds before it adds a bias
        shape = input.shape
        if num_rows > MOST_ROWS:
            num_rows, shape = MOST_ROWS, torch.Size((MOST_ROWS, self.in_features))
        settings = (packing.dtype, packing.is_exact, type(packed), torch.get_num_threads())
        kind = (num_rows, self.in_features, self.out_features, self.bias is not None, len(shape), *settings)
        return packing.shared.trial.reason(kind, functools.partial(self._difference, shape, packing, packed)) is None

    def _difference(self, shape: torch.Size, packing: Packing, packed: PackedCopy) -> str | None:
        """How the packed product of random inputs differs from torch's, as a sentence; None if it does not."""
        numbers = torch.Generator().manual_seed(0)  # not the one that the user's sampling draws from
        columns = self.out_features if packing.has_same_bits else COMPARED_COLUMNS
        bias = None if self.bias is None else self.bias[:columns]
        num_elements = shape[:-1].numel() * self.out_features
        most = MOST_COMPARISONS if packing.has_same_bits else 1
        for _ in range(min(most, max(1, COMPARED_ELEMENTS // num_elements))):
            input = torch.randn(shape, generator=numbers, device="cpu").to(packing.dtype)
            found = multiply(input, packed, self.bias)[..., :columns]
            if not packing.is_same(found.contiguous(), linear(input, self.weight[:columns], bias)):
                sizes = f"{shape[:-1].numel()} x {shape[-1]} by {shape[-1]} x {self.out_features}"
                how = "differs in its bits from" if packing.has_same_bits else "is not within rounding of"
                return f"the packed product of {sizes} in {str(packing.dtype)[6:]} {how} torch's own, which ran instead"
        return None


def identity(weight: Tensor) -> Hashable:
    """A value that changes when a weight is replaced, moved, or written to in a way that autograd notices."""
    version = None if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.dtype, weight.shape, weight.stride()


def checksums(weight: Tensor) -> Tensor:
    """Sums of a weight's bits, [n]: a change of one element always shows, and so do two in one row or one column, such
    as an exchange, or a change of their signs.
    """
    flat = weight.detach().flatten()
    row_bytes = weight.shape[1] * weight.element_size()
    start = weight.storage_offset() * weight.element_size()
    kinds = (torch.int64, torch.int32, torch.int16)
    words = flat.view(next(kind for kind in kinds if row_bytes % kind.itemsize == start % kind.itemsize == 0))
    row_words = len(words) // len(weight)
    # A sum takes every `count`-th word. With more sums than a row or a column has words, and no common factor, no two
    # words of a row or a column are in one sum. Their number is odd, or the highest bits of all could vanish in a sum.
    length = max(1, min(MOST_SUMMED, len(weight) // 2, row_words // 2) - 1 | 1)
    count = next(n for n in range(len(words) // length, 0, -1) if gcd(n, row_words) == 1)
    end, num_parted = count * length, length - length % SUMMED_AT_ONCE
    rows = words[:end].view(length, count)
    sums = rows[:num_parted].view(-1, SUMMED_AT_ONCE, count).sum(1, dtype=torch.int64).sum(0)
    sums += rows[num_parted:].sum(0, dtype=torch.int64)
    return torch.cat([sums, words[end:].long()])


def begin_packing(call: BlockCall) -> Packing | None:
    """The packed weights of a call if PACK asks for them or, on a CPU, is automatic; None with the reason recorded."""
    config, adapter = call.config, call.adapter
    is_asked = config.pack is True
    is_fixed = config.deterministic or torch.are_deterministic_algorithms_enabled()
    if config.pack is False:
        return None
    reason = packing_reason(adapter)
    if reason is not None:
        copies_of(adapter.model).drop()
    elif not is_asked and (needless := packing_is_needless(adapter.dtype)):
        reason = needless
    elif config.num_workers > 1 and not is_asked:
        reason = "each of several processes would keep a copy (PACK=1 does)"
    elif is_fixed and packs_prompts(adapter) and not is_asked:
        reason = "with DETERMINISTIC=1 no text may depend on earlier calls, whose tokens decide when packing begins"
    elif call.num_new < LEAST_NEW_TOKENS and not packs_prompts(adapter) and not is_asked:
        reason = f"a call for fewer than {LEAST_NEW_TOKENS} tokens does not pay for comparing the weights"
    weights = weights_to_pack(adapter) if reason is None else []
    if not weights:
        call.stats.reasons["packed"] = reason or "the model has no linear layers that gain by it"
        return None
    return Packing(call, weights, is_asked)


def packs_prompts(adapter: ModelAdapter) -> bool:
    """Whether a prompt alone can pay for packing: in 16 bits, where the processor has no fast products of its own."""
    return packs_fp16(adapter.dtype) and not adapter.is_exact


def packing_reason(adapter: ModelAdapter) -> str | None:
    """Why no weights of a model can be packed, as a sentence; None if some can.

    Does not depend on how busy the machine is.
    """
    code, dtype = adapter.code, adapter.dtype
    if any(part.device.type != "cpu" for part in adapter.model.parameters()):
        return "weights are packed for a CPU, and this model is not on one"
    error = packing_error(dtype)
    if error is not None:
        return error
    if dtype == torch.float32 and not adapter.is_exact:
        return "float32 products are computed in less than float32"
    if torch.is_autocast_enabled("cpu"):
        return "autocast chooses the dtype of each product"
    if code.is_patched or code.is_hooked:
        return "packed weights need changed modules of the model, which is dispatched, patched or has hooks"
    if code.classes or code.functions or not code.has_plain_weights:
        return "the model has code or weights that are not torch's and transformers' own"
    if (adapter.model.tp_size or 1) > 1:
        return "the model is split over several processes"
    return None


def packing_error(dtype: torch.dtype) -> str | None:
    """Why weights of a dtype cannot be packed here, or gain little by it; None if they can."""
    return None if packs_fp16(dtype) else onednn_error(dtype)


def onednn_error(dtype: torch.dtype) -> str | None:
    """Why oneDNN cannot multiply packed weights of a dtype here, or gains little by it; None if it can."""
    if dtype not in ONEDNN_DTYPES:
        return f"{str(dtype).removeprefix('torch.')} weights are not packed on this machine"
    if dtype == torch.bfloat16 and not has_fast_products(dtype):
        return "this processor has no instructions for bfloat16, without which packed weights gain little"
    operators = ("_linear_pointwise", "_reorder_linear_weight")
    is_there = torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in operators)
    if not is_there or not torch._C._get_mkldnn_enabled():
        return "oneDNN is not in this build of torch, or is switched off"
    return _error_of_product(dtype)


@functools.cache
def _error_of_product(dtype: torch.dtype) -> str | None:
    """`onednn_error`, tried out."""
    with torch.inference_mode():
        weight = torch.zeros((PACKED_FOR, PACKED_FOR), dtype=dtype, device="cpu")
        try:
            multiply(weight, pack(weight), None)
        except RuntimeError as error:
            name = str(dtype).removeprefix("torch.")
            return f"oneDNN does not multiply packed {name} weights on this processor ({str(error).splitlines()[0]})"
    return None


def least_elements(dtype: torch.dtype) -> int:
    """The fewest elements of a weight that pays."""
    return 1 if dtype == torch.bfloat16 and not packs_fp16(dtype) else LEAST_ELEMENTS


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is an unchanged torch Linear."""
    if type(layer) is not nn.Linear or "forward" in vars(layer) or any(vars(layer)[name] for name in HOOKS):
        return False
    weight, bias = layer.weight, layer.bias
    return (
        type(weight) is nn.Parameter
        and weight.is_contiguous()
        and (bias is None or (type(bias) is nn.Parameter and bias.dtype == weight.dtype))
    )


def weights_to_pack(adapter: ModelAdapter) -> list[nn.Parameter]:
    """The weights that pay, of layers that blocks use, largest first, without those for images."""
    roots = (adapter.model.get_decoder(), adapter.model.get_output_embeddings())
    layers: Any = [part for root in roots if root is not None for part in root.modules() if is_plain(part)]
    dtype, least = adapter.dtype, least_elements(adapter.dtype)
    weights = {id(layer.weight): layer.weight for layer in layers}
    pay = [weight for weight in weights.values() if weight.dtype == dtype and weight.numel() >= least]
    return sorted(pay, key=lambda weight: -weight.nbytes)


def pack_layers(shadow: nn.Module, packing: Packing) -> None:
    """Let the layers of a shadow model multiply with a call's copies, once they are made."""
    for layer in shadow.modules():
        if is_plain(layer) and id(layer.weight) in packing.copies:
            layer.__class__ = PackedLinear
            vars(layer).update(packing=packing, key=id(layer.weight))
