"""Which of the library's algorithms computes a product: what is tried, what may win. The library itself: tests/gpu."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_llm import tiny_llm
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.nn import functional

import executors
from asyncsched.errors import AsyncschedError
from executors import few_rows, gated, library_products
from executors.compute import ComputeLane
from executors.cpu import CpuLanes
from executors.cublaslt import Shape
from executors.plain_attention import PlainAttention

ROWS, COLUMNS, DEPTH = 128, 48, 32
SHAPE = Shape(ROWS, COLUMNS, DEPTH, torch.bfloat16)
CPU = torch.device("cpu")


class FakeLibrary:
    """Products whose algorithms are names; each takes so long, adds so much to a product, or is refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.takes: dict[str, float] = {"first": 2.0}
        self.adds: dict[str, float] = {}
        self.refuses: set[str] = set()
        self.own_takes, self.own_adds = 2.0, 0.0
        self.asked: list[Shape] = []
        self.watch: Callable[[Tensor], None] = lambda used: None
        self._linear = functional.linear
        monkeypatch.setattr(library_products, "Products", self._products)
        monkeypatch.setattr(library_products, "_choices", {})
        monkeypatch.setattr(library_products, "_firsts", {})
        monkeypatch.setattr(library_products, "_times", self._times)
        monkeypatch.setattr(library_products, "LEAST_BYTES", 1)
        monkeypatch.setattr(library_products.functional, "linear", lambda x, w: self._linear(x, w) + self.own_adds)

    def _products(self, shape: Shape) -> Any:
        self.asked.append(shape)
        names = list(self.takes)
        return SimpleNamespace(guesses=lambda: names[:1], variants=lambda _: names, multiply=self._multiply)

    def _multiply(self, name: str, x: Tensor, weight: Tensor, output: Tensor) -> None:
        if name in self.refuses:
            raise AsyncschedError("cublasLtMatmul failed with status 7")
        self.watch(weight)
        output.copy_(self._linear(x, weight) + self.adds.get(name, 0.0))
        self.last = name

    def _times(self, tries: list[Any], weights: list[Tensor], rounds: int) -> list[float]:
        found = []
        for each in tries:
            self.last = ""
            each(weights[0])
            found.append(self.takes.get(self.last, self.own_takes))
        return found


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    return FakeLibrary(monkeypatch)


def weight() -> Tensor:
    return torch.randn(COLUMNS, DEPTH, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def chosen(rows: int = ROWS) -> str | None:
    assert library_products.choose([weight()], [rows]) == ""
    found = library_products.choice(SHAPE._replace(rows=rows), CPU)
    return None if found is None or not found.is_used else str(found.algorithm)


def test_the_quickest_is_chosen_and_computes_the_product(library: FakeLibrary) -> None:
    library.takes |= {"slow": 3.0, "quick": 1.0, "middling": 1.5}
    assert chosen() == "quick"
    x = torch.randn(ROWS, DEPTH).to(torch.bfloat16)
    library.last = ""
    assert torch.equal(library_products.product(x, weight()), library._linear(x, weight()))
    assert library.last == "quick"


def test_others_than_the_tried_sizes_are_the_librarys(library: FakeLibrary) -> None:
    library.takes["quick"] = 1.0
    chosen()
    library.last = ""
    library_products.product(torch.zeros(ROWS + 1, DEPTH, dtype=torch.bfloat16), weight())
    assert library.last == ""


def test_an_algorithm_with_other_bits_is_not_chosen(library: FakeLibrary) -> None:
    library.takes |= {"quick": 1.0, "quickest": 0.5}
    library.adds["quickest"] = 0.25
    assert chosen() == "quick"


def test_an_algorithm_that_is_refused_is_not_chosen(library: FakeLibrary) -> None:
    library.takes |= {"quick": 1.0, "quickest": 0.5}
    library.refuses.add("quickest")
    assert chosen() == "quick"


def test_the_librarys_own_choice_stays_where_none_is_quicker(library: FakeLibrary) -> None:
    library.takes["as quick"] = 1.99
    assert chosen() is None


@pytest.mark.parametrize("rows", [library_products.SPLITTING_ROWS, library_products.SPLITTING_ROWS + 1])
def test_where_the_library_splits_the_sum_the_rows_decide_and_no_stopwatch(library: FakeLibrary, rows: int) -> None:
    library.own_adds, library.takes["slow"] = 0.25, 9.0
    for library.own_takes in (0.1, 10.0):
        library_products._choices.clear()
        assert chosen(rows) == (None if rows == library_products.SPLITTING_ROWS else "first")


def test_where_the_librarys_own_stays_alike_products_take_the_quickest_of_one_order(library: FakeLibrary) -> None:
    library.own_adds, library.own_takes, library.takes["quick"] = 0.25, 0.1, 1.0
    assert chosen(3) is None
    x = torch.randn(3, DEPTH).to(torch.bfloat16)
    assert torch.equal(library_products.product_alike(x, weight()), library._linear(x, weight()))
    assert library.last == "quick"
    assert torch.equal(library_products.product(x, weight()), library._linear(x, weight()) + 0.25)


def test_alike_products_are_by_what_was_chosen_or_the_first_guess(library: FakeLibrary) -> None:
    library.takes["quick"] = 1.0
    library.own_adds = 0.25  # is not asked
    x = torch.randn(ROWS, DEPTH).to(torch.bfloat16)
    chosen()
    for rows, expected in ((ROWS, "quick"), (3, "first")):
        assert torch.equal(library_products.product_alike(x[:rows], weight()), library._linear(x[:rows], weight()))
        assert library.last == expected


def test_an_alike_product_that_came_first_takes_what_is_chosen_later(library: FakeLibrary) -> None:
    """As batch-invariant engines do, whose sizes are compared before any is tried."""
    library.takes["quick"] = 1.0
    x = torch.randn(ROWS, DEPTH).to(torch.bfloat16)
    library_products.product_alike(x, weight())
    assert library.last == "first"
    chosen()
    library_products.product_alike(x, weight())
    assert library.last == "quick"


def test_where_there_is_no_library_there_are_no_alike_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_products, "_firsts", {})
    assert library_products.product_alike(torch.zeros(3, DEPTH, dtype=torch.bfloat16), weight()) is None


def test_a_size_is_tried_once(library: FakeLibrary) -> None:
    chosen()
    chosen()
    chosen(64)
    assert [shape.rows for shape in library.asked] == [ROWS, 64]


def test_no_library_is_said_and_nothing_is_chosen(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(shape: Shape) -> None:
        raise AsyncschedError("torch has not loaded libcublasLt.so.13")

    monkeypatch.setattr(library_products, "Products", none)
    assert library_products.choose([weight()], [ROWS]) == "torch has not loaded libcublasLt.so.13"
    assert library_products.choice(SHAPE, CPU) is None


def test_small_weights_and_float32_are_not_tried(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library_products.choose([weight().float()], [ROWS]) == ""
    monkeypatch.setattr(library_products, "LEAST_BYTES", weight().nbytes + 1)
    assert library_products.choose([weight()], [ROWS]) == ""
    assert library.asked == []


def test_weights_that_the_library_would_misread_are_not_tried(library: FakeLibrary) -> None:
    """As `product` does not hand them over either: a kernel that reads off the boundary ends the process's CUDA."""
    moved = torch.empty(weight().numel() + 1, dtype=torch.bfloat16)[1:].view(COLUMNS, DEPTH)
    strided = weight().t().contiguous().t()
    assert library_products.choose([moved, strided], [ROWS]) == ""
    assert library.asked == []
    tried: list[int] = []
    library.watch = lambda used: tried.append(used.data_ptr())
    library_products.choose([moved, weight(), strided], [ROWS])
    assert moved.data_ptr() not in tried
    assert strided.data_ptr() not in tried
    assert tried


def test_layers_of_one_shape_and_two_types_are_tried_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[torch.dtype]] = []
    monkeypatch.setattr(few_rows, "is_own", lambda rows, weight: False)
    monkeypatch.setattr(
        library_products, "choose", lambda weights, sizes: asked.append({w.dtype for w in weights}) or ""
    )
    layers = nn.Sequential(*(few_rows.FewRows(8, 8, bias=False, dtype=dtype) for dtype in 2 * few_rows.DTYPES))
    assert few_rows.choose(layers, [64], [64]) == ""
    assert asked == [{dtype} for dtype in few_rows.DTYPES]


def test_a_model_asks_for_its_layers_at_all_sizes_and_for_its_logits_at_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, tuple[set[tuple[int, ...]], list[int]]] = {}

    def choose(weights: list[Tensor], sizes: list[int]) -> str:
        asked[len(asked)] = {tuple(each.shape) for each in weights}, sizes
        assert len(weights) == (1 if weights[0] is head.weight else model.num_layers)
        return ""

    monkeypatch.setattr(few_rows, "DTYPES", (torch.float32,))
    monkeypatch.setattr(few_rows, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(library_products, "choose", choose)
    model = tiny_model("llama")
    head = model.module.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    few_rows.install(model.module)
    assert few_rows.choose(model.module, [1, 8, 64, 256], [8, 64]) == ""
    with few_rows.alike():  # which has no own products
        assert few_rows.choose(model.module, [1, 8], [8]) == ""
    assert [asked.popitem()[1][1] for _ in range(5)] == [[8], *[[1, 8]] * 4]
    of_head = [sizes for shapes, sizes in asked.values() if tuple(head.weight.shape) in shapes]
    of_layers = [sizes for shapes, sizes in asked.values() if tuple(head.weight.shape) not in shapes]
    # Its weights are too narrow for own products of 8 rows; one row always has one.
    assert of_head == [[8, 64]]
    assert len(of_layers) == 4  # q, k and v; o; gate and up; down
    assert all(sizes in ([8, 64, 256], [64, 256]) for sizes in of_layers)


class OnCuda(Tensor):
    """Says that it is on CUDA."""

    is_cuda = True


@pytest.mark.parametrize("bias", [None, torch.arange(8.0)])
@pytest.mark.parametrize("there", [True, False])
def test_who_computes_a_product_of_many_rows(bias: Tensor | None, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike ones none of our own; those with a bias torch, which has no other way to add it."""
    asked: list[str] = []

    def product(name: str, is_there: bool) -> Callable[..., Tensor | None]:
        def compute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
            asked.append(name)
            return functional.linear(x, weight, bias) if is_there else None

        return compute

    monkeypatch.setattr(few_rows, "_own_product", product("own", there))
    monkeypatch.setattr(library_products, "product_alike", product("alike", there))
    monkeypatch.setattr(library_products, "product", product("library", True))
    x, matrix = torch.randn(2, 3, 4), torch.randn(8, 4).as_subclass(OnCuda)
    expected = functional.linear(x, matrix, bias)
    assert torch.equal(few_rows._linear(x, matrix, bias), expected)
    left = [] if there or bias is not None else ["library"]
    assert asked == ["own", *left]
    asked.clear()
    with few_rows.alike():
        assert torch.equal(few_rows._linear(x, matrix, bias), expected)
    assert asked == ([] if bias is not None else ["alike", *left])


def test_rows_that_have_no_kernel_of_our_own_get_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "multiprocessors", lambda device: 132)
    assert few_rows._own_product(torch.zeros(few_rows.MAX_ROWS + 1, DEPTH), weight(), None) is None


@pytest.mark.parametrize("rows", [1, 8, 300])
def test_gated_layers_that_are_to_be_alike_have_no_kernel_of_their_own(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def joined(product: Tensor, activation: str) -> Tensor:
        asked.append("joined")
        gate, up = product.chunk(2, -1)
        return gated.ACTIVATIONS[activation](gate) * up

    def own(x: Tensor, weight: Tensor, activation: str, *_: object) -> Tensor:
        asked.append("own")
        return joined(functional.linear(x, weight), activation)

    kernels = SimpleNamespace(joined=joined, gated_row=own, gated_rows=own)
    monkeypatch.setattr(executors, "triton_gated", kernels, raising=False)
    monkeypatch.setitem(sys.modules, "executors.triton_gated", kernels)
    monkeypatch.setattr(gated, "_load_kernels", lambda *_: None)
    monkeypatch.setattr(few_rows, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(few_rows, "product", functional.linear)
    x, matrix = torch.randn(rows, 128), torch.randn(256, 128).as_subclass(OnCuda)
    usual = gated._gated(x, matrix, "silu")
    assert asked == (["own", "joined"] if rows < 300 else ["joined"])
    asked.clear()
    with few_rows.alike():
        assert torch.equal(gated._gated(x, matrix, "silu"), usual)
    assert asked == ["joined"]


def test_layers_with_a_bias_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[Tensor]] = []
    monkeypatch.setattr(few_rows, "is_own", lambda rows, weight: False)
    monkeypatch.setattr(library_products, "choose", lambda weights, sizes: asked.append(weights) or "")
    layers = nn.Sequential(few_rows.FewRows(8, 8), few_rows.FewRows(8, 8, bias=False))
    assert few_rows.choose(layers, [64], [64]) == ""
    assert [[id(each) for each in weights] for weights in asked] == [[id(layers[1].weight)]]


def test_what_keeps_the_library_from_being_tried_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "DTYPES", (torch.float32,))
    monkeypatch.setattr(few_rows, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(library_products, "choose", lambda weights, sizes: "no library")
    model = tiny_model("llama")
    few_rows.install(model.module)
    assert few_rows.choose(model.module, [64], [64]) == "no library"


@pytest.mark.parametrize("why", ["", "no library"])
def test_an_engine_has_all_that_its_steps_are_padded_to_tried_before_it_captures(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuLanes, "graphs", True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(PlainAttention, "captures_mixed", True)
    asked: list[object] = []
    monkeypatch.setattr(few_rows, "choose", lambda module, *sizes: asked.append(sizes) or why)
    monkeypatch.setattr(ComputeLane, "capture", lambda *_: asked.append("capture") or "")
    sizes = {"max_num_batched_tokens": 8, "mixed_buckets": (4, 8), "decode_buckets": (1, 2), "max_num_seqs": 4}
    llm = tiny_llm(num_blocks=50, **sizes)
    assert asked == [([1, 2, 4, 8], [1, 2, 4]), "capture"]
    assert why == "" or f"products are as the library would have them: {why}" in [line for line, _ in llm.stages]
