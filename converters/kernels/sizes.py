"""Sizes of grids and blocks, computed on the host.

triton.cdiv and triton.next_power_of_2 are made for kernels too: called from here they take apart and put together
their arguments, 2.5 us a call, and an MLP asks for twenty sizes.
"""


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is n >= 1 or more."""
    return 1 << (n - 1).bit_length()
