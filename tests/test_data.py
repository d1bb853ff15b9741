"""From filelists to batches: both sets of clips, the capacity, padding, and loading ahead."""

import re
import resource
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

import data_utils
from cli import UserError
from corpus.clips import Clip
from data_utils import Item, MelDataset, batch_capacity, collate, load_ahead, load_data, open_mels
from hparams import HParams, create_hparams

# The two sets of clips


def test_each_list_may_have_a_folder_of_its_own(corpus, hparams, monkeypatch):
    """Clips with the same path in both folders are told apart."""
    monkeypatch.chdir(corpus)
    for folder, first in (("one", 0), ("other", 4)):
        Path(folder).mkdir()
        for i in range(4):
            shutil.move(f"{i + first}.wav", f"{folder}/{i}.wav")
        Path(f"{folder}.txt").write_text("".join(f"{i}.wav|tone {i}\n" for i in range(3)))
        Path(f"{folder}_val.txt").write_text("3.wav|tone 3\n")
    lists = "training_files=one.txt+ other.txt,validation_files=one_val.txt+other_val.txt"
    hparams = create_hparams(f"data_dir=one + other,{lists}", base=hparams)
    train, val = load_data(hparams)
    paths = [f"{folder}/{i}.wav" for folder in ("one", "other") for i in range(3)]
    assert [clip.path for clip in train] == paths
    assert [clip.location for clip in train[2:4]] == ["one.txt:3", "other.txt:1"]
    mels = open_mels([*train, *val], hparams)
    lengths = [soundfile.info(path).frames // hparams.hop_length + 1 for path in paths]
    assert [len(mels(clip)) for clip in train] == lengths and lengths[:3] != lengths[3:]
    moved = [clip._replace(path="moved.wav", location="moved.txt:1") for clip in train]
    assert data_utils.data_fingerprint((moved, val)) == data_utils.data_fingerprint((train, val))


def test_validation_texts_that_are_trained_on_are_counted(corpus, hparams, capsys):
    (corpus / "val.txt").write_text("8.wav|EON\n9.wav|of its own\n")
    load_data(hparams)
    assert "note: 1 of the 2 validation clips have texts that are tr" in capsys.readouterr().out


@given(
    st.lists(st.integers(9, 10**6), min_size=1, max_size=9),
    st.sampled_from([8000, 22_050, 48_000]) | st.integers(8000, 96_000),
    st.integers(1, 1000),
    st.integers(1, 10),
    st.sampled_from(["batch_capacity", "batch_capacity_seconds"]),
)
def test_the_capacity_that_a_refusal_suggests_is_accepted(n_frames, rate, hop, per_step, setting):
    clips = [Clip(f"{i}.wav", "", [1, 2], n, f"F:{i}", None) for i, n in enumerate(n_frames)]
    settings = {"sampling_rate": rate, "hop_length": hop, "n_frames_per_step": per_step}
    settings |= {"win_length": 1000, "filter_length": 1024, "mel_fmax": 4000.0, "batch_size": 1}
    hparams = HParams(**settings, **{setting: 1 if setting == "batch_capacity" else hop / rate})
    problem, *_ = data_utils.find_too_long(clips, hparams)
    suggested = re.search(rf"set ({setting}=\S+) or more", str(problem))[1]
    hparams = create_hparams(suggested, base=hparams)
    assert not data_utils.find_too_long(clips, hparams)
    sampler, limit = data_utils.training_sampler(clips, hparams), batch_capacity(hparams)
    assert data_utils.frames_of_steps(sampler, clips)[:, :, 0].max() <= limit


def test_up_to_one_percent_of_bad_clips_can_be_skipped(corpus, hparams, capsys):
    """Also when the mels of the others are cached."""
    hparams = replace(hparams, on_bad_clip="skip")
    soundfile.write(corpus / "silent.wav", np.zeros(9000), 22050)
    names = [f"many{i}.wav" for i in range(200)]
    for name in names:
        shutil.copy(corpus / "0.wav", corpus / name)
    names[7], names[9] = "silent.wav", "gone.wav"
    (corpus / "train.txt").write_text("".join(f"{name}|tone\n" for name in names))
    for _ in range(2):
        train, val = load_data(hparams)
        assert [Path(clip.path).name for clip in train] == [*names[:7], names[8], *names[10:]]
        out = capsys.readouterr().out
        assert "train.txt:8: " in out and "train.txt:10: " in out and "2 of the 200 " in out
        open_mels([*train, *val], hparams)
    with open(corpus / "train.txt", "a") as file:
        file.write("99.wav|tone")
    with pytest.raises(UserError, match=r"/train\.txt: 3 of 201 clips .*; fix them$"):
        load_data(hparams)


# Batches


def test_collate_pads_and_sorts_by_text_length():
    lengths = enumerate([(2, 4), (5, 3), (3, 6)])
    items = [Item(i, torch.full((n,), n), torch.full((m, 10), float(m))) for i, (n, m) in lengths]
    batch = collate(items)
    assert batch.indices == [1, 2, 0]
    assert batch.text.tolist() == [[5, 5, 5, 5, 5], [3, 3, 3, 0, 0], [2, 2, 0, 0, 0]]
    assert batch.text_lengths.tolist() == [5, 3, 2] and batch.mel_lengths.tolist() == [3, 6, 4]
    assert batch.mel.shape == (3, 10, 6) and batch.text.dtype == torch.int64
    assert batch.mel[0, 0].tolist() == [3, 3, 3, 0, 0, 0]
    assert batch.gate.tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1]]
    batch = collate(items, 4)  # whole decoder steps
    assert batch.mel.shape == (3, 10, 8) and not batch.mel[1, :, 6:].any()
    assert batch.mel_lengths.tolist() == [3, 6, 4]
    assert batch.gate.tolist() == [[1, 1], [0, 1], [1, 1]]


@pytest.mark.parametrize(("num_threads", "n_frames_per_step"), [(1, 3), (3, 1)])
def test_batches_follow_the_plan_and_are_loaded_ahead(
    settings, clips, num_threads, n_frames_per_step
):
    """By that many threads, one batch each; and no thread is left after an error."""
    steps = f"n_frames_per_step={n_frames_per_step},batch_capacity=100"
    sampler, asked = data_utils.training_sampler(clips, create_hparams(settings + steps)), []
    is_ahead = threading.Event()

    def zeros(clip):
        asked.append(clip)
        if len(asked) > num_threads:
            is_ahead.set()
        return np.zeros((clip.n_frames, 10), np.float32)

    data, state = MelDataset(clips, zeros, n_frames_per_step), torch.get_rng_state()
    frames = data_utils.frames_of_steps(sampler, clips)[:, 0]
    batches = list(load_ahead(data, sampler, num_threads=num_threads))
    assert [batch.mel[:, 0].numel() for batch in batches] == frames[:, 0].tolist()
    assert [int(batch.mel_lengths.sum()) for batch in batches] == frames[:, 1].tolist()
    assert frames[:, 0].max() <= 100 and not (frames[:, 0] % n_frames_per_step).any()
    for batch, indices in zip(batches, sampler.plan, strict=True):
        assert sorted(batch.indices) == sorted(indices)
        for row, i in enumerate(batch.indices):
            assert batch.text[row, : batch.text_lengths[row]].tolist() == clips[i].ids
            assert batch.mel_lengths[row] == clips[i].n_frames
    assert torch.equal(state, torch.get_rng_state()), "loading draws nothing from training's noise"
    asked.clear()
    is_ahead.clear()
    n_threads = threading.active_count()
    loading = load_ahead(data, [[i] for i in range(8)], num_threads=num_threads)
    assert next(loading).indices == [0] and threading.active_count() > n_threads
    assert is_ahead.wait(60)  # in the background
    with pytest.raises(ZeroDivisionError):
        loading.throw(ZeroDivisionError)
    assert threading.active_count() == n_threads and len(asked) <= num_threads + 1


@pytest.mark.parametrize("change", ["removed", "replaced", "cut"])
def test_a_file_that_changes_while_training_is_named(hparams, clips, change):
    data = MelDataset(clips, open_mels(clips, replace(hparams, cache_mels=False)))
    path, batches = Path(clips[3].path), [[0, 1], [2, 3]]
    assert len(list(load_ahead(data, batches))) == 2
    content = path.read_bytes()
    path.unlink()
    if change != "removed":
        path.write_bytes(content if change == "replaced" else content[: len(content) // 2])
    with pytest.raises(UserError, match=f"^{path}: changed or removed .*; run again[^\n]*$"):
        list(load_ahead(data, batches))


def test_a_full_disk_is_named_when_mels_are_cached(hparams, clips, tmp_path):
    """Here the size of files is limited."""
    hparams = replace(hparams, mel_cache_dir=str(tmp_path / "mels"))
    (tmp_path / "mels").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            data_utils.MelCache(hparams).save(clips[0], np.zeros((80, 100), np.float32))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*(tmp_path / "mels").iterdir()]


def test_validation_batches_depend_on_no_batching_setting(settings, clips):
    batches = data_utils.validation_batches(clips, create_hparams(settings))
    assert sorted(i for batch in batches for i in batch) == list(range(8))
    assert [len(batch) for batch in batches] == [3, 3, 2]
    for change in ("batching_strategy=SB", "dynamic_batch_size=False", "seed=7", "lrf=0.9"):
        assert batches == data_utils.validation_batches(clips, create_hparams(settings + change))
