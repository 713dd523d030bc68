"""Names of modules, many folded into one."""

from collections.abc import Iterable


def collapse(fqns: Iterable[str]) -> list[str]:
    """Names with their layer numbers and last components folded together.

    layers.0.moe.experts.w1, layers.1.moe.experts.w1, and the same of w3 -> layers.{0..1}.moe.experts.{w1,w3}. Only the
    first number of a name is folded, and last components only where they have the same numbers.
    """
    numbers: dict[tuple[str, str], list[int]] = {}
    for fqn in fqns:
        parts = fqn.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        head, tail = (fqn, "") if at is None else (".".join(parts[:at]), ".".join(parts[at + 1 :]))
        numbers.setdefault((head, tail), []).extend([] if at is None else [int(parts[at])])
    folded: dict[str, list[str]] = {}
    for (head, tail), found in numbers.items():
        name = ".".join(part for part in (head, _ranges(found), tail) if part)
        stem, _, last = name.rpartition(".")
        folded.setdefault(stem, []).append(last)
    return [_join(stem, lasts) for stem, lasts in folded.items()]


def _join(stem: str, lasts: list[str]) -> str:
    last = lasts[0] if len(lasts) == 1 else "{" + ",".join(lasts) + "}"
    return f"{stem}.{last}" if stem else ", ".join(lasts)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> {0..2,5}; one number stays bare; none is empty."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}..{high}" for low, high in runs]
    bare = len(runs) <= 1 and "".join(texts).isdigit()
    return texts[0] if bare else "{" + ",".join(texts) + "}" if texts else ""
