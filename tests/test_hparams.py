import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli import UserError
from hparams import (
    NVIDIA_ONLY,
    HParams,
    by_new_names,
    create_hparams,
    format_overrides,
    settings_table,
)

ROOT = Path(__file__).resolve().parent.parent
TEXT = st.text(st.characters(codec="utf-8"))


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


def test_values_as_users_write_them():
    overrides = " lrf = 1e-1 ,cache_mels=true,learning_rate=1,data_dir=/a b/c,mel_cache_dir=x y=z, "
    overrides += "training_files='x seed=y',ignore_layers=[a.weight, 'b'],"
    values = {"lrf": 0.1, "cache_mels": True, "learning_rate": 1.0, "data_dir": "/a b/c"}
    values |= {"mel_cache_dir": "x y=z", "training_files": "x seed=y"}
    assert create_hparams(overrides) == HParams(**values, ignore_layers=("a.weight", "b"))
    assert type(create_hparams(overrides).learning_rate) is float


@given(
    TEXT.filter(lambda text: not {"'", '"'} <= set(text)),
    st.lists(st.text("a', []", min_size=1)).map(tuple),
)
def test_every_setting_survives_being_written_and_parsed(path, layers):
    nvidias = create_hparams(preset="nvidia")
    hparams = dataclasses.replace(nvidias, data_dir=path, ignore_layers=layers)
    assert create_hparams(format_overrides(dataclasses.asdict(hparams))) == hparams


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
    "data_dir=x\ny": "has a line break or the like; leave it out",
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


@given(TEXT | st.from_regex(r"(seed|lrf|data_dir)=.*"))
def test_any_text_parses_or_is_refused_in_one_line(text):
    try:
        assert isinstance(create_hparams(text), HParams)
    except UserError as error:
        assert str(error).isprintable() or "\n" not in str(error)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("print('x')", "output pipe closed"),
        ("open('text', 'w')", "text: Is a directory; move what is there, then run again"),
        (
            "(_ for _ in ()).throw(OSError(13, 'Permission denied', 'text'))",
            "text: Permission denied; allow writing, or use another folder, then run again",
        ),
    ],
)
def test_output_that_cannot_be_written_is_reported_in_one_line(action, message):
    reader, writer = os.pipe()
    os.close(reader)
    code = f"import cli; cli.exit_on_user_error(lambda: {action})"
    options = {"cwd": ROOT, "stdout": writer, "stderr": subprocess.PIPE, "text": True}
    program = subprocess.run([sys.executable, "-c", code], **options)
    os.close(writer)
    assert (program.returncode, program.stderr) == (2, f"error: {message}\n")


def test_the_table_of_settings_has_each_with_its_default_and_a_short_comment():
    """As train.py --help prints it."""
    rows = [line for line in settings_table().splitlines() if line.startswith("  ")]
    for row, field in zip(rows, dataclasses.fields(HParams), strict=True):
        setting, comment = row.split(maxsplit=1)
        assert setting.startswith(f"{field.name}=") and 0 < len(comment) <= 75
        assert getattr(create_hparams(setting.rstrip("=")), field.name) == field.default


def test_settings_of_older_versions_get_their_names_and_values_of_today():
    old = {"decoder": "graph", "epochs": 3}
    assert by_new_names(old) == {"decoder": "auto", "epochs": 3}
    assert by_new_names({"decoder": "scan"}) == {"decoder": "scan"}
