"""A mistake in a recipe ends with a sentence: the file, the section, the option, and what would be right."""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torchtitan
from torchtitan.config import JobConfig

from recipes.recipe_file import _config_class, check_arguments, check_recipe, read_recipe
from recipes.sqnr_twins import read_config
from recipes.user_errors import sentence_of
from train import CONFIG_MODULE, with_config_module

ROOT = Path(__file__).parents[2]
OURS = _config_class(CONFIG_MODULE)
MISTAKES = {
    '[fp8.grouped_experts]\nrecipie = "tokenwise"': "[fp8.grouped_experts] has no option 'recipie': did you mean 'rec",
    "[training]\nqqq = 1": "[training] has no option 'qqq': `python train.py --help` has them all.",
    "[fp8.grouped_expert]": "there is no section [fp8.grouped_expert]: did you mean [fp8.grouped_experts]?",
    "[trainin]\nsteps = 1": "there is no section [trainin]: did you mean [training]?",
    "[zzz]": "there is no section [zzz]: `python train.py --help` has them all.",
    "steps = 1": "A recipe, above its first section, has no option 'steps': `python train.py --help` has them all.",
    "training = 3": "training = 3 is a section: write its options below a line [training].",
    '[training]\nsteps = "ten"': "[training] steps = 'ten' must be a whole number.",
    "[training]\nsteps = 1.5": "[training] steps = 1.5 must be a whole number.",
    "[training]\nsteps = true": "[training] steps = True must be a whole number.",
    '[optimizer]\nlr = "small"': "[optimizer] lr = 'small' must be a number.",
    '[compile]\nenable = "yes"': "[compile] enable = 'yes' must be true or false.",
    '[model]\nconverters = "fp8.dense"': "[model] converters = 'fp8.dense' must be a list, each of it a text in",
    "[model]\nconverters = [1]": "[model] converters = [1] must be a list, each of it a text in quotes.",
    "[model.name]\na = 1": "[model] name = {'a': 1} must be a text in quotes.",
    '[debug]\nseed = "1"': "[debug] seed = '1' must be a whole number.",
    '[fp8.grouped_experts]\nwgrad = "nope"': "[fp8.grouped_experts] wgrad = 'nope' is unknown: choose one of 'fp8', ",
    '[activation_checkpoint]\nmode = "all"': "[activation_checkpoint] mode = 'all' is unknown: choose one of",
    "[training]\nsteps = [1,": "is no TOML file: Invalid value (at ",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_a_sentence(text: str, tmp_path: Path) -> None:
    recipe = tmp_path / "a.toml"
    recipe.write_text(text)
    args = with_config_module(["--job.config_file", str(recipe)])
    for check in (lambda: check_arguments(args), lambda: read_config(str(recipe), [])):
        with pytest.raises(ValueError, match=r".+") as caught:
            check()
        said = sentence_of(caught.value)
        assert said.startswith(str(recipe))
        assert MISTAKES[text] in said


def test_bytes_that_are_no_text_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is no TOML file: 'utf-8' codec"):
        read_recipe(str(tmp_path / "a.toml"))
    with pytest.raises(ValueError, match=r"There is no recipe .*b\.toml"):
        read_recipe(str(tmp_path / "b.toml"))


@pytest.mark.parametrize("flag", ["--job.custom_config_module", "--job.custom-config-module"])
def test_a_module_of_sections(flag: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[fp8.grouped_experts]\n")
    recipe = f"--job.config_file={tmp_path / 'a.toml'}"
    check_arguments([recipe, f"{flag}={CONFIG_MODULE}"])
    check_arguments([recipe, flag, CONFIG_MODULE])
    with pytest.raises(ValueError, match=r"there is no section \[fp8\]"):
        check_arguments([recipe])
    with pytest.raises(ValueError, match=r"'recipes\.jobconfig' cannot be imported: No module named"):
        check_arguments([flag, "recipes.jobconfig"])
    with pytest.raises(ValueError, match=r"'recipes\.runs' has no class JobConfig"):
        check_arguments([f"{flag}=recipes.runs"])


def test_every_recipe_here_and_in_torchtitan_is_right() -> None:
    ours = sorted((ROOT / "recipes").glob("*.toml"))
    theirs = [p for p in Path(torchtitan.__file__).parent.glob("models/**/*.toml") if "flux" not in str(p)]
    assert len(ours) > 10
    for path in ours:
        check_recipe(str(path), read_recipe(str(path)), OURS)
    for path in theirs:  # a wheel may come without them
        check_recipe(str(path), read_recipe(str(path)), JobConfig)
    check_recipe("defaults", asdict(OURS()), OURS)


def test_training_ends_with_the_sentence_alone(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[fp8.grouped_experts]\nrecipie = "tokenwise"\n')
    done = subprocess.run(
        [sys.executable, "train.py", f"--job.config_file={tmp_path / 'a.toml'}", f"--job.dump_folder={tmp_path}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.strip().endswith("has no option 'recipie': did you mean 'recipe'?")
