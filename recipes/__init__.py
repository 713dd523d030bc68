"""What do I run, and how do I check it?

TOML recipes, the model specs and datasets they name, and the tools that read a finished run. `register.py` installs all
of it into torchtitan; nothing here computes in FP8 (that is `converters`) or moves tensors (that is `parallel`).
"""
