"""What to do about a finding, as the lines to put into the recipe."""

from dataclasses import dataclass

from recipes.diagnose_view import DENSE, View, layer_of, owner_of, section_of
from recipes.telemetry_tags import GRADIENTS, WEIGHTS


@dataclass(frozen=True)
class Remedy:
    """One way out. toml: lines for the recipe, of one section; "" where it is no option of ours."""

    why: str
    section: str = ""
    toml: str = ""


def of_non_finite() -> tuple[Remedy, ...]:
    """FP8 makes no inf out of a finite value."""
    why = "a cast saturates, so no cast has made it: look at the earliest one here, or lower the learning rate"
    return (Remedy(why),)


def of_cold_scales(view: View, module: str) -> tuple[Remedy, ...]:
    """Scales that are known before the first cast."""
    return (
        Remedy("take the first maximum before the first cast", "fp8.delayed", "warm_start = true"),
        _current(module, "or scales of the tensor itself, which need no warm-up"),
    )


def of_stale_scales() -> tuple[Remedy, ...]:
    """TransformerEngine#1047, which only a run that asks for it shows."""
    return (
        Remedy("keep a weight and its scale together", "fp8.delayed", 'weights = "cached"'),
        Remedy("or quantize it for every micro-batch", "fp8.delayed", 'weights = "every_microbatch"'),
    )


def of_loads() -> tuple[Remedy, ...]:
    """The router's business."""
    return (Remedy("balance the router: its auxiliary loss or load_balance_coeff; FP8 is not the cause"),)


def of_damage(view: View, module: str, key: str, cause: str) -> tuple[Remedy, ...]:
    """A finer scale, more range, or less FP8. cause: "flushed to zero", "saturated" or "imprecise"."""
    section, recipe, remedies = section_of(module), view.option(module, "recipe"), []
    coarse = recipe in ("delayed", "tensorwise")
    if coarse:
        why = "of this tensor and for each token, not of earlier ones" if recipe == "delayed" else "for each token"
        remedies.append(_current(module, f"scales {why}"))
    if cause == "saturated" and recipe == "delayed":
        why = "leave a factor of 2 for what outgrows the history"
        margin = (view.option_of("delayed", "margin") or 0) + 1
        remedies.append(Remedy(f"or {why}", "fp8.delayed", f"margin = {margin}"))
    if key not in WEIGHTS and not coarse and view.option(module, "wgrad") in ("fp8", None):
        why = "columns far below their row's maximum keep their values in the weight gradient"
        remedies.append(Remedy(why, section, 'wgrad = "fp8_columns"'))
    if key in (*GRADIENTS, "dw", "dw13", "dw2") and view.option(module, "wgrad") != "bf16":
        remedies.append(Remedy("or do not quantize the weight gradient", section, 'wgrad = "bf16"'))
    return tuple(remedies)


def _current(module: str, why: str) -> Remedy:
    return Remedy(why, section_of(module), 'recipe = "tokenwise"')


def skip(view: View, modules: list[str]) -> str:
    """The line that leaves these modules, all of one converter, in BF16; "" if no module would be left to convert."""
    if section_of(modules[0]) == DENSE:
        before = view.option(modules[0], "exclude") or []
        return f"exclude = {_list(list(dict.fromkeys([*before, *(_pattern(m) for m in modules)])))}"
    experts = [m for m in view.owners if section_of(m) == section_of(modules[0])]
    rest = [m for m in experts if m not in {owner_of(bad) for bad in modules}]
    bad = sorted({n for m in modules if (n := layer_of(m)) is not None})
    good = sorted({n for m in rest if (n := layer_of(m)) is not None})
    if good and bad and bad == list(range(bad[-1] + 1)):
        return f"skip_first_layers = {bad[-1] + 1}"
    return f"fqns = {_list(rest)}" if rest else ""


def _pattern(module: str) -> str:
    """wq+wk+wv are excluded by their common module's name."""
    return module.rpartition(".")[0] if "+" in module else module


def _list(names: list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
