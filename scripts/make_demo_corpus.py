"""Make a speech corpus in LJSpeech's layout, spoken by espeak-ng, to try the recipe on.

    python scripts/make_demo_corpus.py corpus --clips 300 --duration_scale 0.4
    python scripts/make_demo_corpus.py corpus --clips 13100       # LJSpeech's size: 3.8 GB

Writes wavs/ID.wav (22,050 Hz, mono, 16 bit), whose durations are spread as LJSpeech's, and
metadata.csv. The same arguments always make the same corpus.

espeak-ng comes with the package espeakng-loader, under the GPL, version 3, while this project is
under the BSD 3-Clause licence: nothing else in it may import this program.
"""

import ctypes
import os
import random
import re
import signal
import sys
import wave
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import (
    ArgumentParser,
    UserError,
    exit_on_user_error,
    make_folder,
    positive,
    progress_bar,
    replace_file,
)

LENGTHS = Path(__file__).resolve().parent.parent / "filelists/ljspeech_lengths.csv"
ENGINE = "espeakng-loader==0.2.4"
SAMPLING_RATE = 22050  # Hz, espeak-ng's own
WORDS_PER_MINUTE = 145  # 15 characters a second, as LJSpeech's speaker reads
MARGIN = 0.04  # seconds of noise before and after the speech
QUIET = 16  # 16-bit steps; samples up to this are cut off at both ends

# {name} stands for a random word of that list.
PATTERNS = (
    "{shout}!", "{shout}, {name}!", "{weekday}.", "{adjective} {object}s.", "Who {past} it?",
    "{name} {went}.", "Was {name} {adjective}?", "{person} {past} {thing}.",
    "{person} {past} {thing} in the {place}.", "Why was {person} in the {place}?",
    "On {weekday}, {person} {past} {thing}.", "{person} {past} {thing} because {person} {went}.",
    "{person} {past} {thing}, {thing} and {thing}.", "{person} said that {person} {past} {thing}.",
    "{person} gave {person} {thing}; {name} {went}.",
)  # fmt: skip
WORDS = {
    "person": "the_{trade} the_{adjective}_{trade} {name} my_{kin} {name}'s_{kin} everyone nobody",
    "thing": "the_{object} a_{adjective}_{object} {name}'s_{object} {number}_{object}s",
    "shout": "no yes up egg go stop wait hush listen never maybe agreed exactly hurry bravo hello",
    "name": "Agnes Boris Clara David Felix Grace Hugo Jack Oscar Quentin Ursula Victor Xenia Zoe",
    "kin": "father mother cousin brother sister nephew niece husband wife neighbor partner",
    "number": "two three four five six seven eight nine ten eleven twelve twenty thirty forty",
    "weekday": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "trade": """baker carpenter teacher sailor judge farmer nurse blacksmith engineer librarian
        musician weaver surgeon shepherd porter jeweler governor lawyer pilot astronomer juggler""",
    "went": """walked waited laughed slept vanished hesitated wept smiled coughed ran whistled
        yawned apologized shivered objected arrived sang climbed danced stood_still got_lost""",
    "past": """mended borrowed weighed fetched polished sketched lifted opened questioned collected
        found bought hid forgot kept lost sold shook chose drew caught stole thought_about""",
    "object": """lamp kettle violin letter bell clock ladder map candle basket mirror wheel bottle
        drum envelope feather guitar hammer key lantern necklace orange quilt umbrella yacht""",
    "adjective": """old young broken golden heavy quiet strange yellow brilliant crooked dusty empty
        frozen green hollow jolly kind lonely muddy purple rusty smooth ugly velvet brave""",
    "place": """harbor market mill railway_station chapel quarry library kitchen bridge lighthouse
        valley museum garden school quay beach castle prison brewery opera_house zoo theater""",
}


def fill(pattern: str, rng: random.Random) -> str:
    """Returns ``pattern`` with random words in it."""
    while "{" in pattern:
        pattern = re.sub(r"\{(\w+)\}", lambda m: rng.choice(WORDS[m[1]].split()), pattern)
    text = re.sub(r"\ba (?=[aeiou])", "an ", pattern.replace("_", " "))
    return text[0].upper() + text[1:]


def reading_seconds(text: str) -> float:
    """Estimates how long the engine takes to say ``text`` (least squares over 300 texts)."""
    letters = len(re.sub(r"[^\w ]", "", text))
    commas = len(re.findall(r"[,;:] | -- ", text))
    stops = len(re.findall(r"[.?!] ", text))
    return 0.1 + 0.06 * letters + 0.54 * commas + 0.6 * stops


def compose(seconds: float, rng: random.Random) -> str:
    """Returns a random text that takes about ``seconds`` to say: the nearest of 60 drafts."""
    drafts = []
    for _ in range(60):
        text = fill(rng.choice(PATTERNS), rng)
        while reading_seconds(text) < seconds - 2:
            text += " " + fill(rng.choice(PATTERNS), rng)
        drafts.append(text)
    return min(drafts, key=lambda text: abs(reading_seconds(text) - seconds))


class Engine:
    """Speaks with espeak-ng. What it has said changes what it says next."""

    def __init__(self) -> None:
        try:
            import espeakng_loader

            self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        except (ImportError, OSError) as error:
            raise UserError(f"{error}; pip install --force-reinstall {ENGINE}") from None
        data = os.fsencode(espeakng_loader.get_data_path())
        # 2: AUDIO_OUTPUT_SYNCHRONOUS, in buffers of 500 ms; 0x8000: report errors, do not exit.
        if self._library.espeak_Initialize(2, 500, data, 0x8000) != SAMPLING_RATE:
            raise UserError(
                f"{os.fsdecode(data)}: no voices found; use a path of at most 150 characters"
            )
        self._library.espeak_SetVoiceByName(b"en-us")
        pointer = ctypes.c_void_p
        receiver = ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.c_int, pointer)
        self._callback = receiver(self._receive)  # an attribute, since the library calls it later
        self._library.espeak_SetSynthCallback(self._callback)

    def _receive(self, samples: int | None, n_samples: int, events: int) -> int:
        if samples:
            self._buffers.append(ctypes.string_at(samples, 2 * n_samples))
        return 0  # go on

    def say(self, text: str, words_per_minute: int) -> np.ndarray:
        """Returns ``text`` as speech, without silence at either end: (n_samples,) int16."""
        self._buffers = []
        text = text.replace("--", "–").encode()  # espeak ignores hyphens, but pauses at a dash
        self._library.espeak_SetParameter(1, words_per_minute, 0)  # 1: espeakRATE
        size = ctypes.c_size_t(len(text) + 1)
        self._library.espeak_Synth(text, size, 0, 1, 0, 1, None, None)  # last 1: UTF-8
        samples = np.frombuffer(b"".join(self._buffers), dtype=np.int16)
        loud = np.flatnonzero(np.abs(samples.astype(int)) > QUIET)
        return samples[loud[0] : loud[-1] + 1]


def draw_seconds(n_clips: int, scale: float) -> np.ndarray:
    """Returns durations spread as LJSpeech's, times ``scale``, shuffled: (n_clips,)."""
    frames = np.loadtxt(LENGTHS, int, delimiter=",", skiprows=1)[:, 0]  # of 256 samples
    shares = (np.arange(n_clips) + 0.5) / n_clips
    seconds = (np.quantile(frames, shares) - 0.5) * 256 / SAMPLING_RATE * scale
    return np.random.default_rng(0).permutation(seconds)


def make_clip(engine: Engine, wav: Path, seconds: float) -> str:
    """Makes a clip of about ``seconds``, and returns its text."""
    rng = random.Random(wav.stem)
    wanted = seconds - 2 * MARGIN
    text = compose(wanted, rng)
    pace = len(engine.say(text, WORDS_PER_MINUTE)) / SAMPLING_RATE / wanted
    speech = engine.say(text, round(WORDS_PER_MINUTE * min(max(pace, 0.85), 1.2)))
    start = round(MARGIN * SAMPLING_RATE)
    # Faint noise everywhere: digital silence has no logarithm.
    noise = np.random.default_rng(rng.getrandbits(64))
    samples = noise.integers(-2, 3, len(speech) + 2 * start)
    samples[start : start + len(speech)] += speech
    with replace_file(wav) as part, wave.open(part, "wb") as file:
        file.setparams((1, 2, SAMPLING_RATE, 0, "NONE", None))
        file.writeframes(np.clip(samples, -32768, 32767).astype("<i2").tobytes())
    return text


def make_corpus(folder: Path, n_clips: int, scale: float) -> None:
    """Makes the corpus, unless it is there already."""
    metadata, made_with = folder / "metadata.csv", folder / "made_with.txt"
    arguments = f"--clips {n_clips} --duration_scale {scale}"
    if folder.exists() and any(folder.iterdir()):
        if not made_with.exists() or made_with.read_text() != f"{arguments}\n":
            fix = "use another folder, or delete it"
            raise UserError(f"{folder}: has files not made with {arguments}; {fix}")
        if metadata.exists():
            print(f"{folder}: already there, {n_clips:,} clips")
            return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # espeak's callback would lose an exception
    engine, lines, total = Engine(), [], draw_seconds(n_clips, scale)
    make_folder(folder / "wavs")
    made_with.write_text(f"{arguments}\n")
    for i, seconds in enumerate(progress_bar(total, "speaking", unit="clip")):
        name = f"DM{i // 250 + 1:03d}-{i % 250 + 1:04d}"
        text = make_clip(engine, folder / f"wavs/{name}.wav", seconds)
        lines.append(f"{name}|{text}|{text}\n")
    with replace_file(metadata) as file:  # last: without it, this is no corpus
        file.write("".join(lines).encode())
    print(f"{folder}: made, {n_clips:,} clips, {total.sum() / 60:.1f} minutes")


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("output_dir", metavar="DIR", type=Path, help="folder for the corpus")
    add("--clips", type=positive, default=300, help="(default 300; LJSpeech has 13100)")
    times = "multiply LJSpeech's durations, 1.1 to 10.1 s, by 0.35 to 3.0 (default 1.0)"
    add("--duration_scale", type=float, default=1.0, metavar="X", help=times)
    args = parser.parse_args(argv)
    if not 0.35 <= args.duration_scale <= 3:  # one short word; half a minute
        raise UserError(f"--duration_scale {args.duration_scale}: use 0.35 to 3.0")
    make_corpus(args.output_dir, args.clips, args.duration_scale)


if __name__ == "__main__":
    exit_on_user_error(main)
