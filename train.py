"""How does it start?  torchrun train.py --job.config_file recipes/llama4_fp8.toml

Prepares the device, registers our converters, models, datasets and the config sections [fp8] and [data], and hands
over to torchtitan's Trainer (recipes/trainer.py). Without torchrun it runs as one process. Every flag is torchtitan's:
`python train.py --help`. What the user can put right ends it with one sentence (recipes/user_errors.py).
"""

import glob
import os
import sys

import tomli

CONFIG_MODULE = "recipes.job_config"
ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def with_config_module(args: list[str]) -> list[str]:
    """`args` with our config sections, unless the command line or the recipe names a module of its own."""
    names = [a.split("=")[0].replace("_", "-") for a in args]
    if "--job.custom-config-module" in names:
        return args
    if "--job.config-file" in names:
        at = names.index("--job.config-file")
        path = args[at].split("=", 1)[1] if "=" in args[at] else "".join(args[at + 1 : at + 2])
        if not os.path.isfile(path):
            sys.exit(f"There is no recipe {path}. Recipes here: {', '.join(sorted(glob.glob('recipes/*.toml')))}")
        if _names_module(path):
            return args
    return [*args, f"--job.custom_config_module={CONFIG_MODULE}"]


def _names_module(path: str) -> bool:
    with open(path, "rb") as f:
        try:
            job = tomli.load(f).get("job")
        except ValueError:  # recipe_file.py says what is wrong with it
            return False
    return isinstance(job, dict) and bool(job.get("custom_config_module"))


def main() -> None:
    """Registers, then trains; see `python train.py --help`."""
    # torchtitan's ConfigManager copies sys.argv when it is imported, so the imports below come after this line.
    sys.argv[1:] = with_config_module(sys.argv[1:])
    if "RANK" not in os.environ:
        os.environ |= ONE_PROCESS
    # Idle OpenMP threads sleep instead of spinning: on two busy cores a debug step takes 0.5 s, not 2 to 4.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from parallel.device import prepare_device

    prepare_device()  # before torchtitan copies the device type

    from torchtitan.train import main as train

    import recipes.register  # noqa: F401  (importing registers)
    from recipes.recipe_file import check_arguments
    from recipes.trainer import Trainer
    from recipes.user_errors import sentence_of, speaks, tell_torchrun

    try:
        check_arguments(sys.argv[1:])
        train(Trainer)
    except Exception as error:
        if (sentence := sentence_of(error)) is None:
            raise
        tell_torchrun(sentence)
        sys.exit(sentence if speaks(sentence) else 1)


if __name__ == "__main__":
    main()
