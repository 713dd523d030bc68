"""Scale rules for studying: any device, no host sync on GPUs, and no gain in speed over BF16.

formats.py     E4M3 and E5M2, scales, the cast
ragged.py      which row belongs to which expert, and maxima of groups
rule.py        the interface, and the rules without a memory
delayed.py     the rule with one, and its state machine; state.py: where that state lives
operand.py     what a rule makes of a tensor
plain.py       that in plain torch, the definition; fused.py: the same numbers from kernels, on GPUs
products.py    GEMMs of quantized operands
gemm.py        grouped_mm, forward and backward, as ops;  mlp.py  the whole SwiGLU MLP
"""
