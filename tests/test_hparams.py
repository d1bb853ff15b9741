import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli import UserError
from hparams import NVIDIA_ONLY, HParams, create_hparams

ROOT = Path(__file__).resolve().parent.parent


def test_the_presets_are_the_paper_and_nvidia():
    paper, nvidia = create_hparams(), create_hparams(preset="nvidia")
    assert (paper.hop_length, paper.win_length, paper.filter_length) == (276, 1102, 2048)
    assert (nvidia.hop_length, nvidia.win_length, nvidia.filter_length) == (256, 1024, 1024)
    for hparams in (paper, nvidia):
        assert hparams.sampling_rate == 22050
        assert (hparams.batch_size, hparams.seed, hparams.epochs) == (16, 0, 220)


@pytest.mark.parametrize(
    ("overrides", "name", "value"),
    [
        ("batch_size=32", "batch_size", 32),
        (" lrf = 1e-1 ,", "lrf", 0.1),
        ("cache_mels=False", "cache_mels", False),
        ("cache_mels=true", "cache_mels", True),
        ("data_dir=/a b/c", "data_dir", "/a b/c"),
        ("data_dir='a, b'", "data_dir", "a, b"),
        ("data_dir='x seed=y'", "data_dir", "x seed=y"),
        ("data_dir=x y=z", "data_dir", "x y=z"),
        ('data_dir="it\'s, here"', "data_dir", "it's, here"),
        ("ignore_layers=[a.weight, 'b']", "ignore_layers", ("a.weight", "b")),
        ("ignore_layers=[]", "ignore_layers", ()),
        ("learning_rate=1", "learning_rate", 1.0),
        ("training_files=a.txt+b.txt", "training_files", "a.txt+b.txt"),
    ],
)  # fmt: skip
def test_values_parse(overrides, name, value):
    parsed = getattr(create_hparams(overrides), name)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("bach_size=3", "unknown setting 'bach_size'; did you mean 'batch_size'?"),
        ("batch_size=3.5", "batch_size=3.5 is not valid; use a whole number"),
        ("batch_size=", "batch_size= is not valid; use a whole number"),
        ("batch_size=0", "setting batch_size=0: use a value above 0"),
        ("cache_mels=1", "cache_mels=1 is not valid; use True or False"),
        ("learning_rate=fast", "learning_rate=fast is not valid; use a number"),
        ("lrf=nan", "setting lrf=nan: use a number up to 1e6"),
        ("learning_rate=1e300", "setting learning_rate=1e+300: use a number up to 1e6"),
        ("seed=99999999999999999999", "use a whole number below 2**31"),
        ("batch_size", "'batch_size' is not name=value"),
        ("seed=1,seed=2", "'seed' is given twice"),
        ("data_dir='x", "unbalanced quotes"),
        ("seed=1,data_dir=x training_files=y,epochs=2",
         "--hparams: 'data_dir=x training_files=y': put a comma before 'training_files='"),
        ("p_prenet_dropout=1", "setting p_prenet_dropout=1.0: a dropout rate is in [0, 1)"),
        ("batching_strategy=SORTED", "use one of RAND, SB, SSB, BKT, ATS"),
        ("precision=fp16", "use one of fp32, tf32, bf16"),
        ("hop_length=4000", "setting hop_length=4000: use at most win_length=1102"),
        ("mel_fmax=12000", "setting mel_fmax=12000.0: use a value above mel_fmin=0.0 up to"),
        ("encoder_kernel_size=4", "use an odd number"),
        ("batch_capacity=9000,dynamic_batch_size=False", "set dynamic_batch_size=True"),
        ("batch_capacity=9000,batch_capacity_seconds=9", "in frames or in seconds, not both"),
    ],
)  # fmt: skip
def test_bad_settings_say_what_to_do(overrides, message):
    with pytest.raises(UserError) as error:
        create_hparams(overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(UserError, match="use one of paper, nvidia"):
        create_hparams(preset="google")


def test_settings_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        create_hparams().seed = 1


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


def test_a_program_whose_output_is_no_longer_read_ends_in_one_line():
    code = (
        "from hparams import exit_on_user_error\nexit_on_user_error(lambda: print('x' * 100_000))"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes) as program:
        program.stdout.close()
        message = program.stderr.read()
    assert message == "error: output pipe closed\n"
    assert program.returncode == 2


def test_the_readme_lists_every_setting_as_it_stands_in_the_source():
    source = (ROOT / "hparams.py").read_text()
    lines = re.findall(r"^    (\w+): [^=]+ = (.+?)  # (.+)$", source, re.M)
    assert [name for name, _, _ in lines] == [field.name for field in dataclasses.fields(HParams)]
    rows = re.findall(r"^\| `(\w+)` \| `(.+)` \| (.+) \|$", (ROOT / "README.md").read_text(), re.M)
    for row, line in zip(rows, lines, strict=True):
        assert row == (line[0], _as_typed(line[1]), line[2])


def _as_typed(default: str) -> str:
    """A default as it is written in --hparams."""
    if default.startswith("("):
        return f"[{default.strip('(,)')}]".replace('"', "")
    return default.strip('"') or " "


@pytest.mark.parametrize("name", NVIDIA_ONLY)
def test_a_setting_of_nvidias_alone_gets_a_sentence(name):
    with pytest.raises(UserError, match=rf"unknown setting '{name}'; NVIDIA's has it; \w+"):
        create_hparams(f"{name}=1")
