"""Settings: how they are written, parsed and refused, and how they compare with NVIDIA's."""

import dataclasses
import re

from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from cli import UserError
from hparams import HParams, create_hparams, format_overrides, parse_overrides

TEXT = st.text(st.characters(codec="utf-8"))


def test_values_are_read_as_users_write_them():
    overrides = " lrf = 1e-1 ,cache_mels=true,learning_rate=1,data_dir=/a b/c,mel_cache_dir=x y=z, "
    overrides += "training_files='x seed=y',ignore_layers=[a.weight, 'b'],"
    values = {"lrf": 0.1, "cache_mels": True, "learning_rate": 1.0, "data_dir": "/a b/c"}
    values |= {"mel_cache_dir": "x y=z", "training_files": "x seed=y"}
    assert create_hparams(overrides) == HParams(**values, ignore_layers=("a.weight", "b"))
    assert type(create_hparams(overrides).learning_rate) is float


AWKWARD = " ,;='\"\\[]()äß\u0301\u200cज"


@given(
    TEXT | st.text("a" + AWKWARD),
    st.lists(st.text("a', []\"\\", min_size=1)).map(tuple),
    st.permutations(AWKWARD).map("".join),
)
def test_every_setting_survives_being_written_and_parsed(path, layers, symbols):
    nvidias = create_hparams(preset="nvidia")
    changes = {"data_dir": path, "ignore_layers": layers, "symbols": symbols}
    hparams = dataclasses.replace(nvidias, **changes)
    assert create_hparams(format_overrides(dataclasses.asdict(hparams))) == hparams


def test_a_symbol_file_is_read_with_the_setting_and_the_embedding_follows(tmp_path):
    file = tmp_path / "a, b.txt"
    file.write_bytes("\ufeff 'ab\r\näß@\n\n".encode())
    hparams = create_hparams(f"symbols='@{file}'")
    assert (hparams.symbols, hparams.n_symbols) == (" 'abäß@", 8)
    assert create_hparams("seed=1", base=hparams) == dataclasses.replace(hparams, seed=1)
    assert create_hparams("symbols=", base=hparams) == HParams()


NVIDIAS = (  # NVIDIA's settings and their defaults
    "epochs=500,seed=1234,ignore_layers=[embedding.weight],text_cleaners=[english_cleaners],"
    "sampling_rate=22050,filter_length=1024,hop_length=256,win_length=1024,n_mel_channels=80,"
    "mel_fmin=0.0,mel_fmax=8000.0,n_symbols=148,symbols_embedding_dim=512,encoder_kernel_size=5,"
    "encoder_n_convolutions=3,encoder_embedding_dim=512,n_frames_per_step=1,decoder_rnn_dim=1024,"
    "prenet_dim=256,max_decoder_steps=1000,p_attention_dropout=0.1,p_decoder_dropout=0.1,"
    "attention_rnn_dim=1024,attention_dim=128,attention_location_n_filters=32,"
    "attention_location_kernel_size=31,postnet_embedding_dim=512,postnet_kernel_size=5,"
    "postnet_n_convolutions=5,learning_rate=1e-3,weight_decay=1e-6,grad_clip_thresh=1.0,"
    "batch_size=64,mask_padding=True"
)


def test_the_lines_of_inference_that_the_page_gives_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "from_nvidia.md").read_text("utf-8")
    (lines,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(lines, names)
    assert len(names["samples"]) > 10_000


def test_nvidias_defaults_come_back_by_the_line_that_the_page_gives():
    page = (ROOT / "docs" / "from_nvidia.md").read_text("utf-8").replace("\\\n", "")
    (overrides,) = re.findall(r'runs/as_nvidia --preset nvidia --hparams "(.*?)"', page)
    hparams = vars(create_hparams(overrides, "nvidia"))
    assert parse_overrides(NVIDIAS).items() <= hparams.items()
    assert (hparams["batching_strategy"], hparams["dynamic_batch_size"]) == ("RAND", False)
    assert (hparams["end_threshold"], hparams["end_steps"]) == (0.5, 1)  # gate_threshold's rule


@given(TEXT | st.from_regex(r"(seed|lrf|data_dir)=.*"))
def test_any_text_parses_or_is_refused_in_one_line(text):
    try:
        assert isinstance(create_hparams(text), HParams)
    except UserError as error:
        assert str(error).isprintable() or "\n" not in str(error)
