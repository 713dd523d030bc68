"""python -m recipes.convert_hf: checkpoints between torchtitan's format and Hugging Face's.

    from-hf  HF_FOLDER CHECKPOINT     for --checkpoint.initial_load_path (a run can also read HF_FOLDER itself, with
                                      --checkpoint.initial_load_in_hf)
    to-hf    CHECKPOINT HF_FOLDER     any checkpoint of a run, e.g. outputs/mixtral_fp8/checkpoint/step-200
    config   HF_FOLDER                adds config.json and the tokenizer to what --checkpoint.last_save_in_hf exported

All take --model and --flavor, a train spec and one of its flavors. Exit code 2: the folders do not fit them.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from torchtitan.protocols import BaseModelArgs
from torchtitan.protocols.train_spec import TrainSpec

from recipes.arguments import number, out_folder
from recipes.models.hf.adapter import HFAdapter
from recipes.models.hf.convert import from_hf, to_hf
from recipes.register import SPECS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What belongs to a model's folder beside its weights and config.json.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"),
    *("chat_template.jinja", "generation_config.json"),
)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (sys.argv when None) and returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        spec, model_args = _model(args.model, args.flavor)
        {"from-hf": _from_hf, "to-hf": _to_hf, "config": _config}[args.command](args, spec, model_args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _from_hf(args: argparse.Namespace, spec: TrainSpec, model_args: BaseModelArgs) -> None:
    with torch.device("meta"):
        weights = dict(spec.model_cls(model_args).named_parameters())
    adapter = spec.state_dict_adapter(model_args, str(args.source))
    from_hf(args.source, args.out, adapter, weights, DTYPES.get(args.dtype))
    print(f"{args.out}: {len(weights)} weights. Start from them with --checkpoint.initial_load_path={args.out}")


def _to_hf(args: argparse.Namespace, spec: TrainSpec, model_args: BaseModelArgs) -> None:
    adapter = spec.state_dict_adapter(model_args, _text(args.assets))
    rules = adapter.layout(args.layout)
    files = to_hf(args.source, args.out, rules, DTYPES.get(args.dtype), int(args.max_shard_gb * 1e9))
    write_config(args.out, adapter, args.assets, args.dtype)
    print(f"{args.out}: {len(files)} tensors in {len(set(files.values()))} files, and config.json")


def _config(args: argparse.Namespace, spec: TrainSpec, model_args: BaseModelArgs) -> None:
    adapter = spec.state_dict_adapter(model_args, _text(args.assets))
    write_config(args.out, adapter, args.assets)
    print(f"{args.out / 'config.json'}: {adapter.config()['architectures'][0]}")


def write_config(out: Path, adapter: HFAdapter, assets: Path | None, dtype: str | None = None) -> None:
    """Writes config.json, that of `assets` if there is one (it knows more), and copies the tokenizer from there.

    Raises:
        ValueError: config.json in `assets` describes another model.
    """
    config = adapter.config()
    if assets is not None:
        adapter.check_config(assets)
        if (assets / "config.json").exists():
            theirs = json.loads((assets / "config.json").read_text())
            # A multimodal config would promise weights of the vision tower.
            config = theirs if "text_config" not in theirs else config
        for name in TOKENIZER_FILES:
            if (assets / name).exists() and assets.resolve() != out.resolve():
                shutil.copy(assets / name, out / name)
    if dtype in DTYPES:
        config |= {"dtype": dtype, "torch_dtype": dtype}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _model(name: str, flavor: str) -> tuple[TrainSpec, BaseModelArgs]:
    if name not in SPECS:
        raise ValueError(f"--model {name!r} is unknown: choose {', '.join(SPECS)}.")
    spec = SPECS[name]()
    if flavor not in spec.model_args:
        raise ValueError(f"--flavor {flavor!r} is unknown to {name}: choose {', '.join(spec.model_args)}.")
    return spec, spec.model_args[flavor]


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipes.convert_hf", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, source in (("from-hf", "HF_FOLDER"), ("to-hf", "CHECKPOINT"), ("config", None)):
        command = commands.add_parser(name)
        if source:
            command.add_argument("source", type=Path, metavar=source)
        command.add_argument("out", type=out_folder, help="folder to write, made if missing")
        command.add_argument("--model", required=True, help=f"one of {', '.join(SPECS)}")
        command.add_argument("--flavor", required=True, help="a flavor of the model, as in a recipe's model.flavor")
        if source:
            command.add_argument("--dtype", choices=[*DTYPES, "stored"], default="stored", help="default: as stored")
        if name != "from-hf":
            command.add_argument("--assets", type=Path, help="folder with the tokenizer and the original config.json")
        if name == "to-hf":
            size = number("size of a file", "a number of GB above 0", above=0)
            command.add_argument("--max-shard-gb", type=size, default=5.0, help="of a file (default %(default)s)")
            command.add_argument("--layout", choices=("hub", "fused"), default="hub", help="Mixtral: fused experts?")
    return parser


if __name__ == "__main__":
    sys.exit(main())
