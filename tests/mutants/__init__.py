"""Planted faults, and the cases in which the checks must find them."""

from mutants import scenarios, workloads  # noqa: F401  # they fill CASES
from mutants.blocks import BLOCKS
from mutants.cases import CASES
from mutants.edges import EDGES
from mutants.equivalents import EQUIVALENT
from mutants.inputs import INPUTS
from mutants.requests import REQUESTS

MUTANTS = (*EDGES, *INPUTS, *BLOCKS, *REQUESTS)

__all__ = ["CASES", "EQUIVALENT", "MUTANTS"]
