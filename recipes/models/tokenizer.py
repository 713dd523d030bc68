"""Builds the tokenizer of a run, and refuses one that does not fit the model before anything is trained."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torchtitan.components.tokenizer import BaseTokenizer, build_hf_tokenizer
from torchtitan.config import JobConfig
from torchtitan.protocols import BaseModelArgs


def checked_tokenizer(model_args: Mapping[str, BaseModelArgs]) -> Callable[[JobConfig], BaseTokenizer]:
    """A `build_tokenizer_fn` for a train spec with these flavors (name -> arguments that have a `vocab_size`)."""
    return partial(build_tokenizer, model_args=model_args)


def build_tokenizer(job_config: JobConfig, model_args: Mapping[str, BaseModelArgs]) -> BaseTokenizer:
    """torchtitan's tokenizer from `model.hf_assets_path`.

    Raises ValueError for a missing folder, an unknown flavor, and a tokenizer with more tokens than the flavor's
    vocabulary: its largest ids would read past the embedding, on a GPU as an assertion far from the cause.
    """
    model = job_config.model
    if not Path(model.hf_assets_path).is_dir():
        raise ValueError(
            f"model.hf_assets_path = {model.hf_assets_path!r} is no folder (from {Path.cwd()}): start from the root of "
            "the repository, or give the folder that holds tokenizer.json."
        )
    if model.flavor not in model_args:
        raise ValueError(f"model.flavor = {model.flavor!r} is unknown to {model.name}: choose {', '.join(model_args)}.")
    tokenizer = build_hf_tokenizer(job_config)
    tokens, vocab_size = tokenizer.get_vocab_size(), model_args[model.flavor].vocab_size
    if tokens > vocab_size:
        raise ValueError(
            f"The tokenizer at {model.hf_assets_path!r} has {tokens:,} tokens, and the vocabulary of {model.name} "
            f"{model.flavor!r} only {vocab_size:,}: choose a flavor with a larger vocab_size, or a smaller tokenizer "
            f"(python -m recipes.make_tokenizer --vocab-size {vocab_size} --out DIR)."
        )
    return tokenizer
