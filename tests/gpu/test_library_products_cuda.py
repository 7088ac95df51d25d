"""The library's products by the algorithms that were chosen: their bits, in graphs too, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiny_models import TINY
from torch.nn import functional

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from asyncsched.errors import AsyncschedError
from asyncsched.request import SamplingParams
from executors import library_products
from executors.cublaslt import Algorithm, Products, Shape
from executors.library_products import Choice
from executors.llm import LLM

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library_products, "_choices", {})
    monkeypatch.setattr(library_products, "_firsts", {})
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    functional.linear(*operands(Shape(64, 64, 64, torch.bfloat16)))  # so that the library is loaded
    yield
    torch.backends.cuda.preferred_blas_library(before)


def operands(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(shape.rows)
    x, weight = (torch.randn(n, shape.depth, generator=generator, device=DEVICE) for n in (shape.rows, shape.columns))
    return x.to(shape.dtype), weight.to(shape.dtype)


def error(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    expected = functional.linear(x.double(), weight.double())
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(40, 4096, 4096), (128, 4096, 14336), (448, 8192, 2048)])
def test_all_algorithms_give_the_same_bits(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    shape = Shape(rows, columns, depth, dtype)
    x, weight = operands(shape)
    products = Products(shape)
    outputs = []
    for algorithm in products.variants(products.guesses()):
        outputs.append(x.new_full((rows, columns), torch.nan))
        products.multiply(algorithm, x, weight, outputs[-1])
    assert len(outputs) > 16
    assert error(outputs[0], x, weight) < 4e-3
    assert all(torch.equal(one, outputs[0]) for one in outputs)


def test_what_was_chosen_computes_a_product_and_in_a_graph_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(256, 4096, 4096, torch.bfloat16)
    x, weight = operands(shape)
    expected = functional.linear(x, weight)
    products = Products(shape)
    last = products.variants(products.guesses())[-1]  # another one than the library takes
    library_products._choices[DEVICE, shape] = Choice(products, last, is_used=True)
    monkeypatch.setattr(functional, "linear", None)  # it is not asked
    assert torch.equal(library_products.product(x, weight), expected)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        output = library_products.product(x, weight)
    x.mul_(2)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected * 2)


@pytest.mark.parametrize(("columns", "depth"), [(4096, 14336), (6144, 4096), (1000, 512)])
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(columns: int, depth: int) -> None:
    x, weight = operands(Shape(2048, columns, depth, torch.bfloat16))
    x = x.contiguous()
    expected = library_products.product_alike(x, weight)
    assert expected is not None
    library_products.choose([weight], [128])
    for rows in (1, 2, 7, 16, 31, 64, 128, 448, 1024):
        assert torch.equal(library_products.product_alike(x[:rows], weight), expected[:rows])


def test_choosing_keeps_the_librarys_bits_where_it_splits_no_sum() -> None:
    shape = Shape(256, 6144, 4096, torch.bfloat16)
    x, weight = operands(shape)
    assert library_products.choose([weight] * 2, [shape.rows]) == ""
    assert (DEVICE, shape) in library_products._choices
    assert torch.equal(library_products.product(x, weight), functional.linear(x, weight))


def test_a_small_weight_is_the_librarys() -> None:
    assert library_products.choose([operands(Shape(64, 512, 512, torch.bfloat16))[1]], [64]) == ""
    assert library_products._choices == {}


def test_operands_off_the_boundary_are_the_librarys() -> None:
    shape = Shape(128, 4096, 4096, torch.bfloat16)
    x, weight = operands(shape)
    products = Products(shape)
    library_products._choices[DEVICE, shape] = Choice(products, Algorithm(), is_used=True)  # would be refused
    moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view_as(x).copy_(x)
    assert torch.equal(library_products.product(moved, weight), functional.linear(moved, weight))


def test_no_algorithm_is_refused_and_leaves_nothing_behind() -> None:
    shape = Shape(128, 4096, 4096, torch.bfloat16)
    x, weight = operands(shape)
    with pytest.raises(AsyncschedError, match="cublasLtMatmul failed with status"):
        Products(shape).multiply(Algorithm(), x, weight, x.new_empty(128, 4096))
    assert error(functional.linear(x, weight), x, weight) < 4e-3  # nobody finds the error later


def test_tokens_are_the_same_whatever_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[1 + (7 * i + j) % 90 for j in range(40)] for i in range(48)]
    settings = {"dummy_weights": True, "tokenizer": None, "dtype": "bfloat16", "max_num_seqs": 48}
    params = SamplingParams(max_tokens=12, temperature=0.0)

    def tokens() -> list[tuple[int, ...]]:
        llm = LLM(TINY["llama"](), device="cuda", num_blocks=400, max_model_len=128, **settings)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    usual = tokens()
    assert library_products._choices == {}  # its weights are small
    monkeypatch.setattr(library_products, "LEAST_BYTES", 0)
    monkeypatch.setattr(library_products, "GAIN", 100.0)  # whatever is quickest but the library's own
    assert tokens() == usual
    assert any(found is not None and found.is_used for found in library_products._choices.values())
