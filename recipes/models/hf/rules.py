"""Rules: which of our weights is which tensor of a Hugging Face checkpoint.

A rule ties some of our weights (`natives`) to some of their tensors (`keys`). An adapter is a list of rules with
concrete names, one for each layer, so that nothing is parsed out of a name and expert 10 never sorts before expert 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from recipes.models.hf.tensors import experts_of, halves, joined, transposed


class Rule(Protocol):
    """in_place: `to_hf` returns views, so whoever fills its tensors has filled our weights."""

    in_place: bool

    @property
    def natives(self) -> tuple[str, ...]:
        """Names of our weights."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the Hugging Face tensors."""

    def to_hf(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their tensors from our weights, of which `weights` has all of `natives`; sharded weights give local ones."""

    def from_hf(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our weights from their tensors, of which `tensors` has all of `keys`."""


@dataclass(frozen=True)
class _OneForOne:
    """One of our weights is one of their tensors."""

    native: str
    key: str

    @property
    def natives(self) -> tuple[str, ...]:
        return (self.native,)

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)


class Same(_OneForOne):
    """One tensor under two names."""

    in_place = True

    def to_hf(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self.key: weights[self.native]}

    def from_hf(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self.native: tensors[self.key]}


@dataclass(frozen=True)
class ExpertList:
    """Our [E, A, B] is E tensors [A, B]; `template` has {} for the expert's number."""

    native: str
    template: str
    num_experts: int
    in_place = True

    @property
    def natives(self) -> tuple[str, ...]:
        return (self.native,)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.template.format(e) for e in range(self.num_experts))

    def to_hf(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self.template.format(e): part for e, part in experts_of(weights[self.native]).items()}

    def from_hf(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self.native: torch.stack([tensors[key] for key in self.keys])}


class Transposed(_OneForOne):
    """Our [E, A, B] is their [E, B, A]."""

    in_place = False

    def to_hf(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self.key: transposed(weights[self.native])}

    def from_hf(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self.native: transposed(tensors[self.key])}


@dataclass(frozen=True)
class GateUp:
    """Our w1 and w3 [E, H, D] are one tensor: [E, 2H, D], or transposed [E, D, 2H]; w1, the gate, comes first."""

    w1: str
    w3: str
    key: str
    is_transposed: bool
    in_place = False

    @property
    def natives(self) -> tuple[str, ...]:
        return (self.w1, self.w3)

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def to_hf(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        w1, w3 = weights[self.w1], weights[self.w3]
        if self.is_transposed:
            return {self.key: joined(transposed(w1), transposed(w3), dim=2)}
        return {self.key: joined(w1, w3, dim=1)}

    def from_hf(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        w1, w3 = halves(tensors[self.key], dim=2 if self.is_transposed else 1)
        if self.is_transposed:
            return {self.w1: transposed(w1), self.w3: transposed(w3)}
        return {self.w1: w1.contiguous(), self.w3: w3.contiguous()}
