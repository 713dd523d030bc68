"""Our sections of the job config, merged into torchtitan's own by `job.custom_config_module = "recipes.job_config"`.

No postponed annotations here: torchtitan's ConfigManager tests `is_dataclass(field.type)`, and a string is none.
"""

from dataclasses import dataclass, field

from converters.config import FP8Config


@dataclass(frozen=True)
class DataConfig:
    """The `[data]` section: how our datasets are read and cut into splits."""

    text_column: str = "text"
    """Column (parquet) or key (jsonl) that holds a document's text."""

    validation_fraction: float = 0.05
    """Share of the documents in NAME_validation. Chosen by a hash of the text: equal texts land in one split."""

    test_fraction: float = 0.05
    """Share of the documents in NAME_test, chosen the same way. The rest is NAME, the training split."""

    shuffle_seed: int = 0
    """Seed of the order of the training documents, the same on every rank and in every epoch."""

    piece_chars: int = 0
    """
    Cut documents between paragraphs into pieces of about this many characters, after they were given to a split: a
    batch then mixes many of them, where a long one fills several steps and moves the loss with its topic. 0: whole.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.text_column, str) or not self.text_column:
            raise ValueError(f"[data] text_column = {self.text_column!r} must be the name of a column.")
        for name in ("shuffle_seed", "piece_chars"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"[data] {name} = {value!r} must be a whole number, 0 or more.")
        for name in ("validation_fraction", "test_fraction"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise ValueError(f"[data] {name} = {value!r} must be a share of the documents, at least 0 and below 1.")
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"[data] validation_fraction = {self.validation_fraction} and test_fraction = {self.test_fraction} "
                "leave nothing to train on: their sum must stay below 1."
            )


@dataclass
class JobConfig:
    """Merged into torchtitan's JobConfig field by field."""

    fp8: FP8Config = field(default_factory=FP8Config)
    """FP8 training, read by the converters whose names start with `fp8.`"""

    data: DataConfig = field(default_factory=DataConfig)
    """Reading and splitting of the datasets python_docs, python_packages, jsonl, text_files and parquet"""
