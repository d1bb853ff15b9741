"""Every setting of the recipe, once, with its unit; presets; the ``name=value`` parser.

    hparams = create_hparams("batch_size=32,batching=RAND", preset="nvidia")

Names are those of NVIDIA's Tacotron 2 where it has one. Section numbers are the paper's
(Ge et al., "Speed up training with variable length inputs by efficient batching
strategies", Interspeech 2021).
"""

import ast
import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from batching import STRATEGIES, read_batching
from cli import UserError, why_not_utf8
from text.symbols import alphabet, check_alphabet

CLEANERS = ("english_cleaners",)
SPEAK_TEXTS = ("Speech appears, slowly.", "Is it clear now?")


def _setting(
    default: Any, meaning: str, accepts: Callable[[Any], bool] = lambda _: True, fix: str = ""
) -> Any:
    """Makes a field: its default, its meaning and unit, and which values it ``accepts``."""
    metadata = {"meaning": meaning, "accepts": accepts, "fix": fix}
    return dataclasses.field(default=default, metadata=metadata)


def _above_0(default: float, meaning: str) -> Any:
    return _setting(default, meaning, lambda x: x > 0, "use a value above 0")


def _from_0(default: float, meaning: str) -> Any:
    return _setting(default, meaning, lambda x: x >= 0, "use 0 or more")


def _share(default: float, meaning: str) -> Any:
    return _setting(default, meaning, lambda x: 0 <= x < 1, "use a value from 0 to below 1")


def _odd(default: int, meaning: str) -> Any:
    return _setting(default, meaning, lambda x: x > 0 and x % 2, "use an odd number")


def _one_of(default: str, choices: Iterable[str], meaning: str) -> Any:
    fix = f"use one of {', '.join(choices)}"
    return _setting(default, f"{' | '.join(choices)}: {meaning}", lambda x: x in choices, fix)


@dataclasses.dataclass(frozen=True)
class HParams:
    """Immutable settings. Impossible values raise :class:`UserError` on construction."""

    # Experiment
    seed: int = _from_0(0, "random seed of weights and dropout; batching adds the epoch to it")
    epochs: int = _above_0(220, "passes over the training set, including those of -c; or set hours")
    hours: float = _from_0(0.0, "train for about so many hours instead of epochs; 0: off")
    epochs_per_validation: int = _above_0(2, "validate every N epochs")
    speak_every: int = _from_0(0, "speak speak_texts at every Nth validation, and the last; 0: off")
    speak_texts: tuple[str, ...] = _setting(SPEAK_TEXTS, "texts not in the training set")
    epochs_per_checkpoint: int = _above_0(2, "save a checkpoint every N epochs")
    checkpoint_minutes: float = _from_0(10.0, "also every N minutes, mid-epoch; 0: off")
    keep_checkpoints: int = _above_0(2, "how many of the newest to keep, besides the best")
    decoder: str = _one_of(
        "auto",
        ("auto", "scan", "reference"),
        "scan is fast, reference calls the modules; auto: scan if they agree",
    )
    precision: str = _one_of(
        "fp32", ("fp32", "tf32", "bf16"), "of matrix products; tf32 on a GPU only"
    )
    deterministic: bool = _setting(False, "deterministic GPU algorithms, where torch has them")
    check_memory: bool = _setting(True, "first see whether the largest batches fit in memory")
    max_bad_steps: int = _above_0(10, "end after N steps in a row of non-finite loss or gradient")

    # Data
    data_dir: str = _setting("", "folder where filelists' paths start; one for each list, with +")
    training_files: str = _setting("filelists/ljspeech_train.txt", "filelists, joined with +")
    validation_files: str = _setting("filelists/ljspeech_val.txt", "filelists, joined with +")
    text_cleaners: tuple[str, ...] = _setting(CLEANERS, "of text/cleaners.py, in this order")
    symbols: str = _setting("", "the alphabet, or @FILE that has it; empty: text/symbols.py")
    on_bad_clip: str = _one_of(
        "error", ("error", "skip"), "refuse to start, or leave out up to 1 % of the clips"
    )
    max_text_length: int = _above_0(500, "longest text allowed, in symbols")
    cache_mels: bool = _setting(True, "keep computed mels on disk; False computes them every time")
    mel_cache_dir: str = _setting("mel_cache", "folder for the cached mels", bool, "name a folder")
    num_workers: int = _above_0(1, "threads that compute mels, with cache_mels=False")

    # Audio
    sampling_rate: int = _above_0(22050, "Hz")
    filter_length: int = _setting(
        2048, "FFT size in samples", lambda x: x > 0 and x % 2 == 0, "use an even number"
    )
    hop_length: int = _above_0(276, "samples between frames; 276 is 12.5 ms (Sec. 6)")
    win_length: int = _above_0(1103, "window length in samples; 1103 is 50 ms, rounded up (Sec. 6)")
    n_mel_channels: int = _above_0(80, "mel bands")
    mel_fmin: float = _from_0(0.0, "lower edge of the mel bands, Hz")
    mel_fmax: float = _above_0(8000.0, "upper edge of the mel bands, Hz")

    # Batching (Sec. 2-5)
    batching_strategy: str = _one_of(
        "SSB", STRATEGIES, "order (Sec. 2-3); batching=SSB-DBS-BR sets this, DBS and BR"
    )
    batch_size: int = _above_0(16, "clips per batch; the base batch size with dynamic_batch_size")
    dynamic_batch_size: bool = _setting(True, "DBS: fill each batch to the capacity (Sec. 4)")
    batch_randomization: bool = _setting(True, "BR: shuffle the order of the batches (Sec. 5)")
    longest_first: bool = _setting(True, "SB, SSB, BKT: sort from the longest clip down, or up")
    lrf: float = _from_0(0.1, "SSB: width of the noise, as a share of the lengths' range (LRF)")
    bucket_size: int = _above_0(1024, "BKT: clips per bucket, with bucket_edges=size")
    bucket_edges: str = _one_of(
        "size", ("size", "uniform", "quantile"), "BKT: how to divide the clips"
    )
    n_buckets: int = _above_0(10, "BKT: number of buckets, with uniform or quantile edges")
    n_bins: int = _above_0(58, "ATS: number of bins")
    batch_capacity: int = _from_0(0, "DBS: frames with padding; 0: batch_size x longest clip")
    batch_capacity_seconds: float = _from_0(0.0, "DBS: batch_capacity in seconds; 0: not set")

    # Model
    n_symbols: int = _above_0(148, "symbols with padding; if symbols is set, as many as it takes")
    symbols_embedding_dim: int = _above_0(512, "features per symbol")
    encoder_n_convolutions: int = _above_0(3, "convolutions in the encoder")
    encoder_kernel_size: int = _odd(5, "width of the encoder's convolutions, in symbols")
    encoder_embedding_dim: int = _above_0(512, "encoder features per symbol, half per direction")
    n_frames_per_step: int = _setting(
        1, "frames that a step of the decoder makes", lambda x: 0 < x <= 10, "use 1 to 10"
    )
    prenet_dim: int = _above_0(256, "units in each of the prenet's two layers")
    attention_rnn_dim: int = _above_0(1024, "units in the attention LSTM")
    attention_dim: int = _above_0(128, "features in which attention compares query and keys")
    attention_location_n_filters: int = _above_0(32, "location filters over past attention weights")
    attention_location_kernel_size: int = _odd(31, "width of the location filters, in symbols")
    decoder_rnn_dim: int = _above_0(1024, "units in the decoder LSTM")
    postnet_embedding_dim: int = _above_0(512, "channels in the postnet")
    postnet_kernel_size: int = _odd(5, "width of the postnet's convolutions, in frames")
    postnet_n_convolutions: int = _above_0(5, "convolutions in the postnet")
    p_encoder_dropout: float = _share(0.5, "dropout rate after each encoder convolution")
    p_prenet_dropout: float = _share(0.5, "dropout rate in the prenet, also in validation")
    p_attention_dropout: float = _share(0.1, "dropout rate of the attention LSTM's hidden state")
    p_decoder_dropout: float = _share(0.1, "dropout rate of the decoder LSTM's hidden state")
    p_postnet_dropout: float = _share(0.5, "dropout rate after each postnet convolution")
    mask_padding: bool = _setting(True, "set mels to 0 and gate logits to 1000 beyond a clip's end")
    end_steps: int = _above_0(40, "speech stops once a clip has ended in its last N steps")
    end_threshold: float = _share(0.5, "with this probability (end_steps=1: NVIDIA's rule)")
    max_decoder_steps: int = _above_0(1000, "inference cuts a clip off after this many steps")

    # Optimisation
    learning_rate: float = _above_0(
        1e-3, "Adam's; 2e-3 may suit short runs of SSB-DBS-BR (docs/results.md)"
    )
    learning_rate_decay: float = _setting(
        0.0,
        "the learning rate falls to 0 over this last share of epochs or hours",
        lambda x: 0 <= x <= 1,
        "use 0 to 1",
    )
    dropout_in_fall: bool = _setting(True, "if False, only the prenet drops out in that fall")
    weight_decay: float = _from_0(1e-6, "Adam's L2 penalty")
    grad_clip_thresh: float = _above_0(1.0, "largest L2 norm of the whole gradient")
    loss: str = _one_of(
        "padded", ("padded", "masked"), "what to minimise: with padding, as NVIDIA's, or without"
    )
    guided_attention_weight: float = _from_0(0.0, "of guided attention (Tachibana et al. 2018)")
    guided_attention_sigma: float = _above_0(0.2, "width of the diagonal that it does not penalise")
    ignore_layers: tuple[str, ...] = _setting(("embedding.weight",), "not loaded by --warm_start")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is float:
                self._check(field.name, abs(value) <= 1e6, "use a number up to 1e6")
            elif field.type is int:
                self._check(field.name, abs(value) < 2**31, "use a whole number below 2**31")
            self._check(field.name, field.metadata["accepts"](value), field.metadata["fix"])
        try:
            check_alphabet(self.symbols)
        except ValueError as error:
            raise UserError(f"setting symbols: {error}") from None
        if self.symbols.startswith("@"):
            raise UserError("setting symbols: '@' names a file if it is first; put it further back")
        least = len(alphabet(self.symbols))
        self._check("n_symbols", self.n_symbols >= least, f"use {least} or more")
        fix = "use an even number: its halves are the two directions of the encoder"
        self._check("encoder_embedding_dim", self.encoder_embedding_dim % 2 == 0, fix)
        for name, limit in (("win_length", "filter_length"), ("hop_length", "win_length")):
            fix = f"use at most {limit}={getattr(self, limit)}"
            self._check(name, getattr(self, name) <= getattr(self, limit), fix)
        fix = f"use a value above mel_fmin={self.mel_fmin} up to {self.sampling_rate / 2} Hz"
        self._check("mel_fmax", self.mel_fmin < self.mel_fmax <= self.sampling_rate / 2, fix)
        for name in ("batch_capacity", "batch_capacity_seconds"):
            ok = self.dynamic_batch_size or not getattr(self, name)
            self._check(name, ok, "set dynamic_batch_size=True, which reads it")
        ok = not (self.batch_capacity and self.batch_capacity_seconds)
        self._check("batch_capacity", ok, "give the capacity in frames or in seconds, not both")

    def _check(self, name: str, ok: bool, fix: str) -> None:
        if not ok:
            raise UserError(f"setting {name}={getattr(self, name)}: {fix}")


TOPICS = {  # by the first setting of each
    "seed": "Experiment",
    "data_dir": "Data",
    "sampling_rate": "Audio",
    "batching_strategy": "Batching (Sec. 2-5)",
    "n_symbols": "Model",
    "learning_rate": "Optimisation",
}
AUDIO = (  # what mels depend on
    "sampling_rate", "filter_length", "hop_length", "win_length", "n_mel_channels", "mel_fmin",
    "mel_fmax",
)  # fmt: skip
NVIDIA_MELS = {"hop_length": 256, "win_length": 1024, "filter_length": 1024}
PRESETS = {
    "paper": {"hop_length": 276, "win_length": 1103, "filter_length": 2048},  # the defaults
    "nvidia": NVIDIA_MELS,  # those of NVIDIA's Tacotron 2, WaveGlow and HiFi-GAN
    "voice": {  # what gives the clearest speech soonest (docs/speech.md)
        **NVIDIA_MELS, "text_cleaners": ("english_phones",), "n_frames_per_step": 2,
        "guided_attention_weight": 1.0, "learning_rate_decay": 0.5, "dropout_in_fall": False,
    },
}  # fmt: skip

# What may change when a run is resumed; anything else would make it another run. The filelists
# are compared by what they list.
MAY_CHANGE = {
    "epochs", "hours", "epochs_per_validation", "epochs_per_checkpoint", "checkpoint_minutes",
    "speak_every", "speak_texts", "keep_checkpoints", "max_bad_steps", "check_memory", "decoder",
    "data_dir", "training_files", "validation_files", "on_bad_clip", "max_text_length",
    "cache_mels", "mel_cache_dir", "num_workers", "end_steps", "end_threshold",
    "max_decoder_steps", "ignore_layers",
}  # fmt: skip

# NVIDIA's settings that are missing here, and what to do instead.
NVIDIA_ONLY = {
    "iters_per_checkpoint": "use epochs_per_checkpoint, epochs_per_validation, checkpoint_minutes",
    "load_mel_from_disk": "mels are computed from the wavs once, and kept: see cache_mels",
    "max_wav_value": "leave it out: samples of any format are read as -1 to 1",
    "fp16_run": "use precision=bf16, or tf32",
    "dynamic_loss_scaling": "leave it out: precision=bf16 needs no loss scaling",
    "gate_threshold": "use end_threshold, and end_steps=1 for NVIDIA's rule",
    "use_saved_learning_rate": "leave it out: --resume keeps the rate, and -c takes learning_rate",
    **dict.fromkeys(
        ("cudnn_enabled", "cudnn_benchmark"),
        "leave it out: cuDNN is used, and does not time its algorithms, since shapes vary",
    ),
    **dict.fromkeys(
        ("distributed_run", "dist_backend", "dist_url", "n_gpus", "rank", "group_name"),
        "on several GPUs: torchrun --nproc_per_node=N train.py ...",
    ),
}


def create_hparams(
    overrides: str = "", preset: str | None = None, base: HParams | None = None
) -> HParams:
    """Returns ``base``, or the defaults, overridden by the preset, then by ``name=value`` pairs
    separated by commas.

    Values: ``batch_size=32``, ``lrf=1e-1``, ``cache_mels=False``, ``data_dir=/a/b`` or
    ``data_dir='a, b'``, ``ignore_layers=[embedding.weight,postnet]``; and ``batching=SSB-DBS-BR``,
    which sets ``batching_strategy``, ``dynamic_batch_size`` and ``batch_randomization``.

    Raises:
        UserError: an unknown preset or name (the nearest one is suggested), a value of the
            wrong type, or an impossible one.
    """
    if preset is not None and preset not in PRESETS:
        raise UserError(f"--preset {preset}: unknown; use one of {', '.join(PRESETS)}")
    values = {} if base is None else dataclasses.asdict(base)
    return HParams(**(values | PRESETS.get(preset, {}) | parse_overrides(overrides)))


def audio_settings(sampling_rate: int) -> dict[str, int | float]:
    """Returns the audio settings for a sampling rate in Hz: windows of 50 ms every 12.5 ms (Sec.
    6), rounded up to samples."""
    win_length = -(-sampling_rate // 20)
    return {
        "sampling_rate": sampling_rate,
        "hop_length": -(-sampling_rate // 80),
        "win_length": win_length,
        "filter_length": 1 << (win_length - 1).bit_length(),
        "mel_fmax": min(HParams.mel_fmax, sampling_rate / 2),
    }


def settings_table() -> str:
    """Returns the settings by topic, a line each: name, default and meaning."""
    lines = []
    for field in dataclasses.fields(HParams):
        if field.name in TOPICS:
            lines += ["", f"{TOPICS[field.name]}:"]
        setting = f"{field.name}={quote(field.default)}"
        lines.append(f"  {setting:<37}  {field.metadata['meaning']}")
    return "\n".join(lines).strip()


def parse_overrides(overrides: str) -> dict[str, object]:
    """Returns the settings named in ``overrides`` (see :func:`create_hparams`) and their values. Of
    a setting that is named twice, the later value counts.

    Raises:
        UserError: an unknown name, a value of the wrong type, or both epochs and hours.
    """
    if re.search("[\x00-\x1f\x7f\x85\u2028\u2029]", overrides):
        raise UserError(f"--hparams {overrides!r}: has a line break or the like; leave it out")
    fields = {field.name: field.type for field in dataclasses.fields(HParams)}
    values = {}
    for pair in _split(overrides):
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise UserError(f"--hparams: '{pair.strip()}' is not name=value; separate with commas")
        if name == "batching":
            values |= _read_batching(text)
            continue
        if name not in fields:
            near = [f for f in fields if name == "".join(word[0] for word in f.split("_"))]  # lr
            near += difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else "train.py --help lists the settings"
            if name in NVIDIA_ONLY:
                hint = f"NVIDIA's code has it: {NVIDIA_ONLY[name]}"
            raise UserError(f"--hparams: unknown setting '{name}'; {hint}")
        values[name] = _parse(name, text, fields[name])
    if "symbols" in values:
        if values["symbols"].startswith("@"):
            values["symbols"] = read_symbols(values["symbols"][1:])
        values.setdefault("n_symbols", len(alphabet(values["symbols"])))
    if "epochs" in values and values.setdefault("hours", 0.0):
        both = f"hours={values['hours']:g},epochs={values['epochs']}"
        raise UserError(f"--hparams: {both}: each says when training ends; leave one out")
    return values


def read_symbols(file: str) -> str:
    """Returns the characters in ``file`` without its line breaks, in order: an alphabet.

    Raises:
        UserError: it cannot be read, has no characters, or one that cannot be a symbol.
    """
    file = os.path.expanduser(file)
    try:
        characters = Path(file).read_bytes().decode("utf-8-sig", "surrogateescape")
        if problem := why_not_utf8(characters):
            raise ValueError(problem)
        characters = re.sub("[\r\n]", "", characters)
        check_alphabet(characters)
    except (OSError, ValueError) as error:
        problem = str(error)
        if isinstance(error, OSError):
            problem = f"{error.strerror}; name a file that has the alphabet's characters"
        raise UserError(f"symbols=@{file}: {problem}") from None
    if not characters:
        raise UserError(f"symbols=@{file}: has no characters; write those of the language")
    return characters


def _split(text: str) -> list[str]:
    """Splits at commas that are outside quotes and brackets."""
    # Quoted text, which a quote after a backslash does not end, or one character.
    tokens = re.findall(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|.""", text)
    parts, depth = [""], 0
    for token in tokens:
        depth += (token in "[(") - (token in "])")
        if token == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    if depth or "'" in tokens or '"' in tokens:
        raise UserError(f"--hparams: unbalanced quotes or brackets in '{text}'")
    return [part for part in parts if part.strip()]


def _read_batching(name: str) -> dict[str, object]:
    """Returns the three settings that a name such as SSB-DBS-BR stands for."""
    try:
        return read_batching(name)._asdict()
    except ValueError as error:
        raise UserError(f"--hparams: {error}") from None


def _parse(name: str, text: str, kind: type) -> object:
    """Returns ``text`` as a value of the field's type."""
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind is int:
            if not re.fullmatch(r"[+-]?\d+", text):
                raise ValueError
            return int(text)
        if kind is float:
            return float(text)
        if kind is str:
            return _unquote(text)
        items = text[1:-1] if text[:1] + text[-1:] in ("[]", "()") else text  # tuple[str, ...]
        return tuple(_unquote(item.strip()) for item in _split(items))
    except (KeyError, ValueError, SyntaxError):
        wanted = {bool: "True or False", int: "a whole number", float: "a number"}
        raise UserError(
            f"--hparams: {name}={text} is not valid; use {wanted.get(kind, 'a quoted string')}"
        ) from None


def format_overrides(settings: Mapping[str, object]) -> str:
    """Writes ``settings`` as :func:`parse_overrides` reads them."""
    return ",".join(f"{name}={quote(value)}" for name, value in settings.items())


def quote(value: object) -> str:
    """Writes a setting's value as :func:`parse_overrides` reads it."""
    if isinstance(value, tuple):
        items = ",".join(map(quote, value))
        return items if len(value) == 1 else f"[{items}]"
    text = str(value)
    return text if re.fullmatch(r"[\w@%+=:./~-]+", text) else repr(text)


def _unquote(text: str) -> str:
    return ast.literal_eval(text) if text[:1] in ("'", '"') else text
