"""Linear layers that multiply with weights laid out once for oneDNN, on a CPU.

torch's own product of a few rows reorders the weight in each call, or multiplies in an unsuitable layout. With weights
reordered once, a block of guesses costs little more than reading them. The user's model is not changed: blocks run on a
weight-sharing shadow model whose plain `nn.Linear` layers are `PackedLinear`, and the prompt runs on the model itself.
The projections of queries, keys and values are packed one below another and computed as one product (`PartOfProduct`):
in small models calling a product costs more than computing it.

The packed copies of a model are shared by its calls and freed with it. Before each call that uses them, checksums
show whether the weights have changed since they were packed: a write through `weight.data`, such as merging
an adapter, changes neither the address nor the version counter of a parameter.

Source: the operators that torch.compile's freezing uses, `mkldnn::_reorder_linear_weight` and
`mkldnn::_linear_pointwise`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd, inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from lade.compat import HOOKS
from lade.forward.free_memory import free_bytes
from lade.models.base import ModelAdapter
from lade.models.shadow import shadow_model
from lade.state import PerModel
from lade.tolerance import largest_difference, largest_value

# The fewest elements of a weight that pay by dtype, and the fewest rows of an input. In float32 torch's product of
# one row is as fast as a packed one, and it depends on the machine whether weights below two million elements gain.
LEAST_ELEMENTS = {torch.bfloat16: 1, torch.float32: 1 << 21}
SMALL_ELEMENTS = 3 << 15  # if they do: below this, calling oneDNN costs more than it gains
LEAST_ROWS = {torch.bfloat16: 1, torch.float32: 2}
MOST_ROWS = 128  # of an input: beyond, the layout matters little, and each new number of rows would need a comparison
PACKED_FOR = 16  # rows that the layout is chosen for
# New tokens that calls must have asked for before their model is packed: packing and comparing products cost about a
# dozen plain steps. Each change of the weights doubles it, so that a training loop does not pack for nothing.
TOKENS_BEFORE_PACKING, MOST_DOUBLINGS = 64, 4
LEAST_NEW_TOKENS = 16  # of a call: comparing the weights, and making the shadow model, cost up to a plain step
# The share of free memory that the copies may take.
COMFORTABLE_SHARE, LARGEST_SHARE = 0.5, 0.9
# A product is compared on random inputs until so many elements have been seen, but not more often than this.
COMPARED_ELEMENTS, MOST_COMPARISONS = 1 << 15, 64
PRODUCT_TOLERANCE = 1e-5  # in float32, relative to the largest element; half precision must have the same bits
MOST_SUMMED = 511  # words of 8 bytes that go into one checksum
# Layers of a module that have the same input, in the order of their calls. gate_proj and up_proj do too, but for
# products as large as theirs the call is a small part of the time.
SAME_INPUT = ("q_proj", "k_proj", "v_proj")

Weights = tuple[nn.Parameter, ...]  # of one product: of one layer, or of several that have the same input
Key = tuple[int, ...]  # the weights' ids


def multiply(input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """input @ weight.T + bias. input: [..., K]. packed: of `pack`. Returns [..., N]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")
    return product


def pack(weights: Sequence[Tensor]) -> Tensor:
    """Weights of [N, K] each, one below another, in oneDNN's opaque layout."""
    with torch.inference_mode(False), torch.no_grad():  # other calls may be in another mode
        weight = torch.cat([part.detach() for part in weights]) if len(weights) > 1 else weights[0].detach()
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
    return packed


def key_of(weights: Iterable[Tensor]) -> Key:
    return tuple(map(id, weights))


def bytes_of(weights: Weights) -> int:
    return sum(weight.nbytes for weight in weights)


@dataclass(slots=True)
class PackedWeight:
    """The packed copy of a product's weights, and what reveals a change of them.

    Without references to them, even weak ones, with which `torch.utils.swap_tensors` refuses to work.
    """

    identities: tuple[Hashable, ...]
    checksums: tuple[Tensor, ...]
    packed: Tensor | None = None  # None if memory was short
    num_bytes: int = 0  # of the copy
    num_proven: int = 1  # the first so many layers have used their part of the product

    @classmethod
    def of(cls, weights: Weights) -> PackedWeight:
        return cls(tuple(map(identity, weights)), tuple(map(checksums, weights)))


Copies = dict[Key, PackedWeight]


@dataclass
class PackedWeights:
    """What the calls of a model share."""

    copies: Copies = field(default_factory=dict)
    # By shapes: how packed products differ from torch's, as a sentence; None if they do not.
    differences: dict[tuple[Any, ...], str | None] = field(default_factory=dict)
    apart: set[Key] = field(default_factory=set)  # weights of layers that turned out to have different inputs
    num_asked: int = 0  # new tokens since the weights last changed
    num_changes: int = 0  # times that weights were found changed
    lock: threading.Lock = field(default_factory=threading.Lock)

    def prepare(self, weights: Sequence[Weights], num_new: int, is_asked: bool) -> tuple[bool, Copies, str | None]:
        """The copies of these weights in their present state, for a call for `num_new` tokens. Missing ones are made if
        memory allows.

        is_asked: pack regardless of that number. Returns whether the call should have copies, which depends only on
        the calls so far and on the weights; the copies that exist; and why some are missing, as a sentence.
        """
        with self.lock:
            self.num_asked += num_new
            if num_new < LEAST_NEW_TOKENS and not is_asked:
                too_short = f"a call for fewer than {LEAST_NEW_TOKENS} tokens does not pay for comparing the weights"
                return False, {}, too_short
            self._drop_changed(weights, num_new)
            least = TOKENS_BEFORE_PACKING << min(self.num_changes, MOST_DOUBLINGS)
            if self.num_asked < least and not is_asked:
                return False, {}, f"calls have asked for {self.num_asked} tokens, and packing pays from {least} on"
            reason = self._pack(weights, is_asked)
            copies = {key: self.copies[key] for key in map(key_of, weights)}
            return True, {key: copy for key, copy in copies.items() if copy.packed is not None}, reason

    def expect(self, num_new: int) -> None:
        """Pack as if calls for so many new tokens had been made."""
        with self.lock:
            self.num_asked += num_new

    def drop(self) -> None:
        """Free the copies once no call uses them."""
        with self.lock:
            self.copies = {}

    def _drop_changed(self, weights: Sequence[Weights], num_new: int) -> None:
        known = [group for group in weights if key_of(group) in self.copies]
        current = [group for group in known if is_current(self.copies[key_of(group)], group)]
        if len(current) < len(known):
            self.num_changes += 1
            self.num_asked = num_new
        self.copies = {key: self.copies[key] for key in map(key_of, current)}

    def _pack(self, weights: Sequence[Weights], is_asked: bool) -> str | None:
        """Copy what is missing, the largest weights first. Returns why some still are, as a sentence."""
        for group in weights:
            if key_of(group) not in self.copies:
                self.copies[key_of(group)] = PackedWeight.of(group)
        missing = [group for group in weights if self.copies[key_of(group)].packed is None]
        if not missing:
            return None
        free = free_bytes()
        if free is None and not is_asked:
            return "how much memory is free is not known (PACK=1 packs all the same)"
        left = inf if free is None else free * (LARGEST_SHARE if is_asked else COMFORTABLE_SHARE)
        num_refused = 0
        for group in sorted(missing, key=bytes_of, reverse=True):
            copy, num_bytes = self.copies[key_of(group)], bytes_of(group)
            if num_bytes > left:
                num_refused += len(group)
                continue
            copy.packed, copy.num_bytes = pack(group), num_bytes
            left -= num_bytes
        if not num_refused:
            return None
        size = f"{(free or 0) >> 20} MiB"
        return f"{num_refused} weights are not packed: too little of the {size} of free memory would be left"


_packed: PerModel[PackedWeights] = PerModel(PackedWeights)


def packed_weights(model: PreTrainedModel) -> PackedWeights:
    return _packed.of(model)


def held_bytes() -> tuple[int, int]:
    """The number of weights that this process has packed, over all models, and the bytes of their copies."""
    copies = [copy for weights in _packed.all() for copy in list(weights.copies.values()) if copy.packed is not None]
    return sum(len(copy.checksums) for copy in copies), sum(copy.num_bytes for copy in copies)


def identity(weight: Tensor) -> Hashable:
    """A value that changes when a weight is replaced, moved, or written to in a way that autograd notices."""
    version = None if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.dtype, weight.shape, weight.stride()


def checksums(weight: Tensor) -> Tensor:
    """Sums of a weight's bits, [n]: a change of one element always shows, and rows or columns that change places do."""
    flat = weight.detach().flatten()
    row_bytes = weight.shape[1] * weight.element_size()
    start = weight.storage_offset() * weight.element_size()
    kinds = (torch.int64, torch.int32, torch.int16)
    words = flat.view(next(kind for kind in kinds if row_bytes % kind.itemsize == start % kind.itemsize == 0))
    # Pieces shorter than a row that end elsewhere in each row: whole rows would not show exchanged columns.
    row_words = len(words) // len(weight)
    # With no more words than the weight has rows, some piece ends at each place of a row.
    most = max(1, min(row_words - 1, MOST_SUMMED, len(weight)))
    length = next(n for n in range(most, 0, -1) if gcd(n, row_words) == 1)
    end = len(words) // length * length
    sums = words[:end].view(-1, length).sum(1, dtype=torch.int64)
    return torch.cat([sums, words[end:].sum(0, keepdim=True, dtype=torch.int64)])


def is_current(copy: PackedWeight, weights: Weights) -> bool:
    """Whether the weights are unchanged since they were packed."""
    return all(
        identity(weight) == known and torch.equal(checksums(weight), sums)
        for weight, known, sums in zip(weights, copy.identities, copy.checksums, strict=True)
    )


@dataclass(slots=True)
class PackedProducts:
    """The packed products of one call."""

    copies: Copies
    shared: PackedWeights
    is_exact: bool  # the call computes in float32: bits may differ, as they do between sizes of blocks
    seconds: float = 0.0  # spent on comparing products since it was last set to 0

    @property
    def num_weights(self) -> int:
        return sum(map(len, self.copies))

    @property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self.copies.values())

    @property
    def refusal(self) -> str | None:
        """Why some products were torch's own, as a sentence; None if no comparison failed."""
        return next(filter(None, list(self.shared.differences.values())), None)

    def is_same(self, found: Tensor, expected: Tensor) -> bool:
        """Bit for bit in half precision, within rounding in float32.

        So in half precision no text depends on whether there was memory to pack.
        """
        if self.is_exact:
            return largest_difference(found, expected) <= PRODUCT_TOLERANCE * largest_value(expected)
        return torch.equal(found.view(torch.int16), expected.view(torch.int16))


class Product:
    """What a shadow model's layers compute with one packed copy: their outputs side by side."""

    def __init__(self, layers: Sequence[nn.Linear], copy: PackedWeight, products: PackedProducts) -> None:
        self.weights = tuple(layer.weight for layer in layers)
        self.biases = tuple(layer.bias for layer in layers)
        self.copy, self.products = copy, products
        self.bias = self.biases[0] if len(layers) == 1 or self.biases[0] is None else torch.cat(self.biases)
        self.widths = tuple(layer.out_features for layer in layers)
        self.in_features, self.dtype = layers[0].in_features, layers[0].weight.dtype
        # The latest product's input, and each layer's part of the product until the last layer has taken its part.
        self.input: Tensor | None = None
        self.parts: list[Tensor] = []

    def of(self, input: Tensor) -> Tensor:
        """input: [..., K]. Returns [..., the sum of the layers' N]."""
        assert self.copy.packed is not None
        return multiply(input, self.copy.packed, self.bias)

    def separate(self) -> None:
        """Let later calls pack these layers one by one."""
        self.products.shared.apart.add(key_of(self.weights))

    def agrees(self, input: Tensor) -> bool:
        """Whether the packed product of such an input may replace aten's. Compared at the first use of a shape."""
        num_rows = input.numel() // max(1, self.in_features)
        if not LEAST_ROWS[self.dtype] <= num_rows <= MOST_ROWS:
            return False
        if input.dtype != self.dtype or input.shape[-1] != self.in_features:
            return False
        if not input.is_contiguous():  # torch then rounds before it adds a bias
            return False
        products, differences = self.products, self.products.shared.differences
        shape = (num_rows, self.in_features, self.widths, self.bias is not None, self.dtype)
        key = (*shape, input.dim(), torch.get_num_threads(), products.is_exact)
        if key not in differences:
            began = perf_counter()
            differences[key] = self._compare(input.shape)
            products.seconds += perf_counter() - began
        return differences[key] is None

    def _compare(self, shape: torch.Size) -> str | None:
        """How the packed product of random inputs differs from torch's, as a sentence; None if it does not."""
        numbers = torch.Generator().manual_seed(0)  # not the one that the user's sampling draws from
        num_elements = shape[:-1].numel() * sum(self.widths)
        for _ in range(min(MOST_COMPARISONS, max(1, COMPARED_ELEMENTS // num_elements))):
            input = torch.randn(shape, generator=numbers).to(self.dtype)
            expected = torch.cat([linear(input, *layer) for layer in zip(self.weights, self.biases, strict=True)], -1)
            if not self.products.is_same(self.of(input), expected):
                sizes = f"{shape[:-1].numel()} x {shape[-1]} by {shape[-1]} x {sum(self.widths)}"
                how = "is not within rounding of" if self.products.is_exact else "differs in its bits from"
                return f"the packed product of {sizes} in {str(self.dtype)[6:]} {how} torch's own, which ran instead"
        return None


class PackedLinear(nn.Linear):
    """Replaces an `nn.Linear` in a shadow model."""

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., K]. Returns [..., N]."""
        product: Product = self.__dict__["product"]
        return product.of(input) if product.agrees(input) else linear(input, self.weight, self.bias)


class PartOfProduct(nn.Linear):
    """Replaces one of several `nn.Linear` that have the same input, in a shadow model.

    The first computes the product of all, and the others look up their parts by the input. If there is no part for that
    input, or its first values differ from the layer's own (the input was changed in place), the layer computes its own
    product. In this case, and if parts are never used, later calls pack these layers one by one.
    """

    def whole(self, input: Tensor) -> Tensor | None:
        """The outputs of all these layers side by side, for code that needs no parts; None if they are not packed.

        input: [..., K]. Returns [..., the sum of the layers' N].
        """
        product: Product = self.__dict__["product"]
        return product.of(input) if product.agrees(input) else None

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., K]. Returns [..., N], contiguous as an nn.Linear's output is."""
        product: Product = self.__dict__["product"]
        place: int = self.__dict__["place"]
        if place == 0 and product.agrees(input):
            if product.parts:  # not all parts of the latest product were used
                product.separate()
            product.input = input
            product.parts = [part.contiguous() for part in product.of(input).split(product.widths, -1)]
        if product.input is not input:
            if place > 0 and product.agrees(input):
                product.separate()
            return linear(input, self.weight, self.bias)
        found = product.parts[place]
        if place == len(product.widths) - 1:
            product.input, product.parts = None, []
        if place < product.copy.num_proven:
            return found
        expected = linear(input, self.weight, self.bias)
        if not product.products.is_same(found, expected):
            product.separate()
            return expected
        product.copy.num_proven += place == product.copy.num_proven
        return found


def packing_reason(adapter: ModelAdapter) -> str | None:
    """Why no weights of a model can be packed, as a sentence; None if some can.

    Does not depend on how busy the machine is.
    """
    code, dtype = adapter.code, adapter.dtype
    if any(part.device.type != "cpu" for part in adapter.model.parameters()):
        return "weights are packed for a CPU, and this model is not on one"
    if dtype not in LEAST_ELEMENTS:
        return f"weights are packed in bfloat16 and float32, not in {str(dtype).removeprefix('torch.')}"
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
    """Why oneDNN cannot multiply packed weights of a dtype here, as a sentence; None if it can."""
    operators = ("_linear_pointwise", "_reorder_linear_weight")
    is_there = torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in operators)
    if not is_there or not torch._C._get_mkldnn_enabled():
        return "oneDNN is not in this build of torch, or is switched off"
    return _error_of_product(dtype)


@functools.cache
def _error_of_product(dtype: torch.dtype) -> str | None:
    """`packing_error`, tried out: in half precision it depends on the processor, and by which rule on torch."""
    with torch.inference_mode():
        weight = torch.zeros((PACKED_FOR, PACKED_FOR), dtype=dtype, device="cpu")
        try:
            multiply(weight, pack([weight]), None)
        except RuntimeError as error:
            name = str(dtype).removeprefix("torch.")
            return f"oneDNN does not multiply packed {name} weights on this processor ({str(error).splitlines()[0]})"
    return None


@functools.cache
def small_products_pay() -> bool:
    """Whether packed products of a few rows with small float32 weights are faster here than torch's own, by a tenth.

    Timed once per process, on weights that do not stay in a core's own caches, as those of a model do not: torch uses
    another library than oneDNN, which is slow on some processors.
    """
    with torch.inference_mode():
        input = torch.full((8, 512), 0.5, dtype=torch.float32, device="cpu")
        weights = [torch.full((1536, 512), 0.5, dtype=torch.float32, device="cpu") for _ in range(4)]
        copies = [pack([weight]) for weight in weights]
        seconds: dict[str, list[float]] = {"torch": [], "packed": []}
        for _ in range(5):
            began = perf_counter()
            for weight in weights:
                linear(input, weight)
            between = perf_counter()
            for copy in copies:
                multiply(input, copy, None)
            seconds["torch"].append(between - began)
            seconds["packed"].append(perf_counter() - between)
    return min(seconds["packed"]) < 0.9 * min(seconds["torch"])


def least_elements(dtype: torch.dtype) -> int:
    """The fewest elements of a weight that pays."""
    if dtype == torch.float32 and small_products_pay():
        return SMALL_ELEMENTS
    return LEAST_ELEMENTS[dtype]


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is an unchanged torch Linear with a weight that pays."""
    if type(layer) is not nn.Linear or "forward" in vars(layer) or any(vars(layer)[name] for name in HOOKS):
        return False
    weight, bias = layer.weight, layer.bias
    return (
        type(weight) is nn.Parameter
        and weight.dtype in LEAST_ELEMENTS
        and weight.numel() >= least_elements(weight.dtype)
        and weight.is_contiguous()
        and (bias is None or (type(bias) is nn.Parameter and bias.dtype == weight.dtype))
    )


def groups_of(model: nn.Module, apart: set[Key]) -> Iterator[tuple[nn.Linear, ...]]:
    """The layers of a model whose weights can be packed, each once: those of one product together."""
    grouped: set[int] = set()
    parts = list(model.modules())
    for part in parts:
        group: Any = tuple(part._modules.get(name) for name in SAME_INPUT)
        if can_be_one_product(group) and key_of(layer.weight for layer in group) not in apart:
            grouped.update(map(id, group))
            yield group
    for part in parts:
        if is_plain(part) and id(part) not in grouped:
            yield (part,)  # type: ignore[misc]


def can_be_one_product(layers: Sequence[Any]) -> bool:
    if not all(layer is not None and is_plain(layer) for layer in layers):
        return False
    kinds = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}
    return len(kinds) == 1 and len({id(layer.weight) for layer in layers}) == len(layers)


def weights_to_pack(adapter: ModelAdapter) -> list[Weights]:
    """The weights of layers that blocks use, without those for images."""
    apart = packed_weights(adapter.model).apart
    roots = (adapter.model.get_decoder(), adapter.model.get_output_embeddings())
    groups = [group for root in roots if root is not None for group in groups_of(root, apart)]
    weights: list[Any] = [tuple(layer.weight for layer in group) for group in groups]
    return list({key_of(group): group for group in weights}.values())


def packed_model(model: Any, products: PackedProducts, attention: str | None = None) -> Any:
    """A shadow of a model whose layers multiply with the copies, if there are any. attention: as for a shadow."""
    shadow = shadow_model(model, attention)
    for layers in groups_of(shadow, products.shared.apart):
        copy = products.copies.get(key_of(layer.weight for layer in layers))
        if copy is None:
            continue
        product = Product(layers, copy, products)
        for place, layer in enumerate(layers):
            layer.__class__ = PackedLinear if len(layers) == 1 else PartOfProduct
            vars(layer).update(product=product, place=place)
    return shadow
