"""Why did an FP8 run differ from BF16?  Megatron-LM #1152 in small: README.md, python -m recipes.issue1152."""
