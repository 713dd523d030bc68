"""A run's telemetry as diagnosis wants it: by module and operand, with what its config says was to be expected."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from converters.numerics import OWN_GRAD_DTYPE
from recipes.runs import Run, Series
from recipes.telemetry_tags import GEMMS, GRAD_NORM, GRADIENTS, ROOT, parse

EXPERTS, DENSE = "fp8.grouped_experts", "fp8.dense"

# dB. What a format leaves of values that stay normal, whatever the granularity of the scales: 3 or 2 bits of mantissa.
# Measured for normal and log-normal values; the noises of a GEMM's two operands add up.
E4M3_DB, E5M2_DB = 31.5, 25.5
GEMM_DB = {"e4m3": 28.5, "e5m2": 24.5}


@dataclass(frozen=True)
class View:
    """`run` with its telemetry. Steps of a module in which an operand was cast with scale 1 (cold) are set apart."""

    run: Run

    @cached_property
    def figures(self) -> dict[tuple[str, str], dict[str, Series]]:
        """(module, operand or GEMM) -> figure -> series."""
        found: dict[tuple[str, str], dict[str, Series]] = {}
        for tag, series in self.run.scalars.items():
            if (parts := parse(tag)) is not None:
                found.setdefault(parts[:2], {})[parts[2]] = series
        return dict(sorted(found.items(), key=lambda item: (natural(item[0][0]), item[0][1])))

    @cached_property
    def modules(self) -> list[str]:
        """The measured modules, layer by layer."""
        return list(dict.fromkeys(module for module, _ in self.figures))

    @cached_property
    def owners(self) -> list[str]:
        """The same, without the weights that FSDP2 gathers and that are measured under their own names."""
        return list(dict.fromkeys(map(owner_of, self.modules)))

    @cached_property
    def steps(self) -> list[int]:
        """Measured steps."""
        return sorted({s for tag, series in self.run.scalars.items() if tag.startswith(ROOT) for s in series})

    @cached_property
    def cold(self) -> dict[tuple[str, str], int]:
        """(module, operand) -> the last step until which every scale was exactly 1, and not at a later step.

        With delayed scaling also where no later step has been measured; by another rule a power of two may well be 1.
        """
        found = {}
        for at, figures in self.figures.items():
            low, high = figures.get("scale_min", {}), figures.get("scale_max", {})
            ones = [step for step, value in low.items() if value == 1 and high.get(step) == 1]
            others = [step for step in low if step not in ones]
            if ones and (max(ones) < min(others) if others else self.option(at[0], "recipe") == "delayed"):
                found[at] = max(ones)
        return found

    def settled(self, module: str, key: str, figure: str) -> Series:
        """A series without the module's cold steps: they have a finding of their own."""
        last = max((step for (m, _), step in self.cold.items() if m == module), default=0)
        return {s: v for s, v in self.figures[module, key].get(figure, {}).items() if s > last}

    def series(self, suffix: str) -> dict[str, Series]:
        """MoE layer -> series of `fp8/LAYER/suffix`."""
        ending = f"/{suffix}"
        tags = [t for t in self.run.scalars if t.startswith(ROOT) and t.endswith(ending)]
        return {t.removeprefix(ROOT).removesuffix(ending): self.run.scalars[t] for t in sorted(tags, key=natural)}

    def grad_norm(self, group: str) -> Series:
        """The norm of a group's gradients, before clipping."""
        return self.run.series(GRAD_NORM + group)

    def option(self, module: str, name: str) -> Any:
        """What the run's config says of the converter of this module; None if the run has no run.json."""
        return self.option_of(section_of(module).removeprefix("fp8."), name)

    def option_of(self, section: str, name: str) -> Any:
        """The same of `[fp8.section]`."""
        config = ((self.run.info or {}).get("config") or {}).get("fp8") or {}
        return (config.get(section) or {}).get(name)

    def gradient_format(self, module: str) -> str:
        """e4m3 or e5m2."""
        asked = self.option(module, "grad_dtype") or "auto"
        return OWN_GRAD_DTYPE.get(self.option(module, "recipe"), "e4m3") if asked == "auto" else asked

    def expected_db(self, module: str, key: str) -> float:
        """The SQNR of an operand or a GEMM whose values stay normal in FP8."""
        gradients = self.gradient_format(module)
        if key in GEMMS:
            return GEMM_DB[gradients if key.startswith("d") else "e4m3"]
        return E5M2_DB if key in GRADIENTS and gradients == "e5m2" else E4M3_DB


def section_of(module: str) -> str:
    """The converter, and section of the config, of a module."""
    return EXPERTS if ".experts" in module else DENSE


def owner_of(module: str) -> str:
    """The module whose weight this is, if it is one that FSDP2 gathers."""
    stem, _, last = module.rpartition(".")
    return stem if last in ("w1", "w2", "w3") and ".experts" in module else module


def layer_of(module: str) -> int | None:
    """The number of its layer."""
    found = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", module)
    return int(found[1]) if found else None


def natural(name: str) -> list[object]:
    """Sorts layer 10 after layer 2."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
