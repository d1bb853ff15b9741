import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli import UserError, exit_on_user_error
from hparams import NVIDIA_ONLY, HParams, create_hparams, settings_table

ROOT = Path(__file__).resolve().parent.parent


def test_the_presets_are_the_paper_and_nvidia():
    for preset, frames in ((None, (276, 1102, 2048)), ("nvidia", (256, 1024, 1024))):
        hparams = create_hparams(preset=preset)
        assert (hparams.hop_length, hparams.win_length, hparams.filter_length) == frames
        assert hparams.sampling_rate == 22050
        assert (hparams.batch_size, hparams.seed, hparams.epochs) == (16, 0, 220)
        with pytest.raises(dataclasses.FrozenInstanceError):
            hparams.seed = 1
    with pytest.raises(UserError, match="use one of paper, nvidia"):
        create_hparams(preset="google")


VALUES = {
    "batch_size=32": 32,
    " lrf = 1e-1 ,": 0.1,
    "cache_mels=False": False,
    "cache_mels=true": True,
    "data_dir=/a b/c": "/a b/c",
    "data_dir='a, b'": "a, b",
    "data_dir='x seed=y'": "x seed=y",
    "data_dir=x y=z": "x y=z",
    'data_dir="it\'s, here"': "it's, here",
    "ignore_layers=[a.weight, 'b']": ("a.weight", "b"),
    "ignore_layers=[]": (),
    "learning_rate=1": 1.0,
    "training_files=a.txt+b.txt": "a.txt+b.txt",
}


@pytest.mark.parametrize("overrides", VALUES)
def test_values_parse(overrides):
    parsed = getattr(create_hparams(overrides), overrides.partition("=")[0].strip())
    assert parsed == VALUES[overrides] and type(parsed) is type(VALUES[overrides])


REFUSED = {
    "bach_size=3": "unknown setting 'bach_size'; did you mean 'batch_size'?",
    "batch_size=3.5": "batch_size=3.5 is not valid; use a whole number",
    "batch_size=": "batch_size= is not valid; use a whole number",
    "batch_size=0": "batch_size=0: use a value above 0",
    "cache_mels=1": "cache_mels=1 is not valid; use True or False",
    "learning_rate=fast": "learning_rate=fast is not valid; use a number",
    "lrf=nan": "lrf=nan: use a number up to 1e6",
    "learning_rate=1e300": "learning_rate=1e+300: use a number up to 1e6",
    "seed=99999999999999999999": "use a whole number below 2**31",
    "batch_size": "'batch_size' is not name=value",
    "seed=1,seed=2": "'seed' is given twice",
    "data_dir='x": "unbalanced quotes",
    "seed=1,data_dir=x training_files=y,epochs=2": (
        "--hparams: 'data_dir=x training_files=y': put a comma before 'training_files='"
    ),
    "p_prenet_dropout=1": "p_prenet_dropout=1.0: a dropout rate is in [0, 1)",
    "batching_strategy=SORTED": "use one of RAND, SB, SSB, BKT, ATS",
    "precision=fp16": "use one of fp32, tf32, bf16",
    "hop_length=4000": "hop_length=4000: use at most win_length=1102",
    "mel_fmax=12000": "mel_fmax=12000.0: use a value above mel_fmin=0.0 up to",
    "encoder_kernel_size=4": "use an odd number",
    "batch_capacity=9000,dynamic_batch_size=False": "set dynamic_batch_size=True",
    "batch_capacity=9000,batch_capacity_seconds=9": "in frames or in seconds, not both",
    **{f"{name}=1": f"unknown setting '{name}'; NVIDIA's " for name in NVIDIA_ONLY},
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_bad_settings_say_what_to_do(overrides):
    with pytest.raises(UserError, match=f"^.*{re.escape(REFUSED[overrides])}.*$"):
        create_hparams(overrides)


def test_every_setting_survives_being_written_and_parsed():
    hparams = create_hparams(preset="nvidia")
    text = ",".join(
        f"{name}={list(value) if isinstance(value, tuple) else repr(value)}"
        for name, value in dataclasses.asdict(hparams).items()
    )
    assert create_hparams(text) == hparams


@given(st.text(alphabet=st.characters(codec="utf-8")) | st.from_regex(r"(seed|lrf|data_dir)=.*"))
def test_any_text_parses_or_is_refused_in_one_line(text):
    try:
        assert isinstance(create_hparams(text), HParams)
    except UserError as error:
        assert str(error).isprintable() or "\n" not in str(error)


def test_a_closed_output_pipe_is_reported_in_one_line():
    code = "import cli; cli.exit_on_user_error(lambda: print('x' * 100_000))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes) as program:
        program.stdout.close()
        message = program.stderr.read()
    assert message == "error: output pipe closed\n"
    assert program.returncode == 2


def test_a_file_that_cannot_be_written_is_reported_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        exit_on_user_error(lambda: tmp_path.write_text(""))
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path}: Is a directory; move what is there, then run again\n"
    )


def test_the_table_of_settings_has_each_with_its_default_and_a_short_comment():
    """As train.py --help prints it."""
    rows = [line for line in settings_table().splitlines() if line.startswith("  ")]
    for row, field in zip(rows, dataclasses.fields(HParams), strict=True):
        setting, comment = row.split(maxsplit=1)
        assert setting.startswith(f"{field.name}=") and 0 < len(comment) <= 75
        assert getattr(create_hparams(setting.rstrip("=")), field.name) == field.default
