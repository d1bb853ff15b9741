"""Make a speech corpus in LJSpeech's layout, spoken by espeak-ng, to try the recipe on.

    python scripts/make_demo_corpus.py corpus --clips 300 --duration_scale 0.4
    python scripts/make_demo_corpus.py corpus --clips 13100       # LJSpeech's size: 3.8 GB
    python scripts/make_demo_corpus.py german --voice de --transcripts texts.txt

Writes wavs/ID.wav (22,050 Hz, mono, 16 bit), as long as LJSpeech's, and metadata.csv. The same
arguments give the same bytes, with any number of workers.

espeak-ng comes with the package espeakng-loader, under the GPL, version 3, while this project is
under the BSD 3-Clause licence: nothing else here may import this program.
"""

import argparse
import ctypes
import difflib
import hashlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import wave
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, positive, progress_bar
from files import locked, replacing, require_space

SAMPLING_RATE = 22050  # Hz, espeak-ng's own
ENGINE = "espeakng-loader==0.2.4"
CHUNK = 64  # clips per process
VOICE = "en-us"
WORDS_PER_MINUTE = 145  # 15 characters a second, as LJSpeech's speaker reads
PADDING = (0.005, 0.039, 0.080)  # seconds of noise around the speech: least, usual, most
SILENCE = 16  # 16-bit steps; anything quieter is cut off at both ends

# LJSpeech's durations: this share of its clips is shorter than this many frames of 256 samples.
DURATION_SHARES = (0, 0.02, 0.06, 0.15, 0.3, 0.5, 0.8, 0.95, 1)
DURATION_FRAMES = (96, 178, 248, 350, 466, 585, 750, 838, 870)

# Each rule has alternatives, separated by bars or, where there are none, by spaces. {name} stands
# for a random alternative of that rule, _ for a space.
GRAMMAR = """
word: {exclamation} | {exclamation} | {name} | {town} | {object}s | {did} | {adverb} | {adjective}
    | {weekday} | {month} | {number} | {trade}s
phrase: {thing} | {things} | {where} | {when} | {person} {went} | {nature} {happened}
    | {verb} {thing} | {exclamation}, {name} | {adjective} and {adjective} | {person} {adverb}
    | who {did} {thing} | chapter {number} | it was {clock}
sentence: {clause}. | {clause} {when}. | {clause}, {joined}. | {clause}, {joined}, {joined}.
    | {clause}; {clause}. | {clause} -- {joined}. | {when}, {clause}. | {adverb}, {clause}.
    | {person} {said} that {clause}. | {exclamation}! | {verb} {thing} {where}.
    | who {did} {thing} {where}? | why did {person} {verb} {thing}?
clause: {person} {did} {thing} | {person} {did} {thing} {where} | {person} {adverb} {did} {thing}
    | {person} {went} {where} | {things} {lay} {where} | {person} gave {person} {thing}
    | {nature} {happened} | {person} and {person} {went}
    | {person} {did} {thing}, {thing} and {thing} | the {place} was {adjective}
joined: and {clause} | but {clause} | because {clause} | while {clause} | until {clause}
person: the {trade} | the {adjective} {trade} | {title} {surname} | {name} | {name} {surname}
    | my {kin} | {name}'s {kin} | the {trade} from {town} | everyone | nobody
thing: the {object} | a {adjective} {object} | a {object} of {material} | {name}'s {object}
    | the {trade}'s {object} | this {adjective} {object}
did: {verb}ed | {verb}ed | {past}
things: {object}s | {adjective} {object}s | {number} {object}s | {number} {adjective} {object}s
where: in the {place} | near the {place} | behind the {place} | in {town} | under the {object}
    | beyond the {place} | outside {town} | between the {place} and the {object}
when: on {weekday} | in {month} | at {clock} | every {weekday} | last {season}
    | on the {ordinal} of {month} | before {clock} | all {season}
nature: the {weather} | the {adjective} {weather}
number: {digit} | {tens} | {tens}-{digit} | {digit} hundred
clock: {digit} o'clock | half past {digit} | a quarter to {digit} | noon | midnight
exclamation: no yes up it egg go cut stop wait hush listen never enough silence maybe perhaps beware
    agreed exactly hurry fire help bravo hello thanks wake_up not_yet so_what well_done too_late
    at_once sit_down who_knew why_not good_heavens look_out what_nonsense
digit: two three four five six seven eight nine
tens: twenty thirty forty fifty sixty seventy eighty ninety
ordinal: first second third fourth fifth eighth ninth twelfth twenty-first
title: Mister Missus Doctor Captain Colonel Reverend Miss Aunt Uncle
name: Agnes Boris Clara David Edith Felix Grace Hugo Iris Jack Karen Leo Martha Nora Oscar Paul
    Quentin Rose Simon Tess Ursula Victor Wanda Xenia Yusuf Zoe
surname: Ashworth Beaumont Doyle Everett Fitzgerald Garza Hargrove Ibsen Jenkins Kowalski Lindquist
    Norwood Okafor Quincy Ramirez Sharma Thackeray Underhill Velasquez Whitaker Yardley Zimmerman
town: Bristol Lisbon Geneva Oxford Vienna Naples Zurich Boston Halifax Kingston Madrid Quebec
    Jakarta Cairo Dublin Exeter Yokohama Warsaw York Chicago Oslo Phoenix
weekday: Monday Tuesday Wednesday Thursday Friday Saturday Sunday
season: spring summer autumn winter week year
month: January February March April May June July August September October November December
kin: father mother cousin grandmother brother sister nephew niece husband wife neighbor partner
trade: baker carpenter teacher sailor clerk judge farmer nurse blacksmith printer gardener engineer
    librarian musician weaver surgeon painter shepherd porter jeweler governor lawyer pilot
    astronomer merchant juggler beekeeper captain messenger zookeeper chemist dancer king general
said: said replied whispered explained muttered insisted remarked answered shouted admitted wrote
went: walked waited laughed slept vanished hesitated wept smiled coughed ran nodded whistled refused
    apologized shivered yawned objected arrived sang hurried climbed danced stood_still got_lost
    fell_asleep drank_coffee played_chess
past: carried found bought hid forgot kept lost sold shook chose buried drew caught brought stole
    threw_away thought_about
verb: mend paint borrow weigh fetch polish repair sketch inspect lift open follow question collect
    visit cover
lay: vanished lay stood_in_rows were_for_sale were_missing grew hung_on_hooks gathered_dust
adverb: quietly slowly secretly proudly carefully suddenly gladly nearly always quickly finally
    gently calmly easily eagerly once often rarely luckily at_last by_then as_usual
weather: rain wind snow thunder moon fog tide river sun sky storm smoke crowd fox zebra train jury
happened: stopped rose turned_north froze faded came_back grew_louder shook_the_windows changed
object: lantern kettle violin ledger quilt ladder basket mirror clock jug saddle map barrel umbrella
    anchor wheel telescope hammer coat key photograph zither oboe axe jewel teapot blanket candle
    trumpet letter necklace bicycle rug wardrobe pumpkin fishing_rod globe whip vase pillow sword
    xylophone yoke chessboard kite ticket bottle parrot goat horse jacket coin rope feather spoon
    plum book orange shell pearl glove
adjective: small heavy broken yellow wooden ancient smooth ugly green rare blue expensive dusty
    enormous sharp hollow rusty foreign warm empty precious ordinary curved frozen quaint bright
    plain wet golden crooked new fragile purple square cheap delicate black thin mysterious striped
    fresh cheerful young stubborn quiet clever famous generous nervous polite jealous lazy curious
material: oak copper silk iron leather silver paper canvas glass zinc brass wool ivory jade clay
place: harbor market orchard mill railway_station chapel quarry library kitchen bridge lighthouse
    valley museum garden cellar forest school quay beach castle prison bank brewery staircase
    opera_house jetty zoo square theater road farm
"""

RULES = {}
for rule in re.split(r"\n(?=\w+:)", GRAMMAR.strip()):
    name, _, alternatives = rule.partition(":")
    separator = "|" if "|" in alternatives else None
    RULES[name] = [" ".join(part.split()) for part in alternatives.split(separator)]


def expand(rule: str, rng: random.Random) -> str:
    """A random text of ``rule``."""
    text = re.sub(r"\{(\w+)\}", lambda match: expand(match[1], rng), rng.choice(RULES[rule]))
    return re.sub(r"\ba (?=[aeiou])", "an ", text.replace("_", " "))


def reading_seconds(text: str) -> float:
    """About how long the engine takes to say this, to 7 %: least squares over 600 texts."""
    letters = len(re.sub(r"[^\w ]", "", text))
    commas = len(re.findall(r"[,;:] | -- ", text))
    stops = len(re.findall(r"[.?!] ", text))
    return 0.19 + 0.06 * letters + 0.35 * commas + 0.6 * stops


def write(seconds: float, rng: random.Random) -> str:
    """A random text that takes about ``seconds`` to say."""
    for attempt in itertools.count(1):
        if seconds < 1.8:
            text = expand("word" if seconds < 0.75 else "phrase", rng) + rng.choice(".!?")
        else:
            text = expand("sentence", rng)
            while reading_seconds(text) < seconds - 1:
                text += " " + expand("sentence", rng)
        text = re.sub(r"(?:^|[.!?] )[a-z]", lambda match: match[0].upper(), text)
        if abs(reading_seconds(text) / seconds - 1) < 0.005 * attempt:
            return text


def read_transcripts(path: Path) -> dict[str, str]:
    """``ID|text`` lines → {ID: text}. A :class:`UserError` names the line that cannot be used."""
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines()
    except OSError as error:
        raise UserError(f"--transcripts {path}: {error.strerror}; give ID|text lines") from None
    texts, used = {}, set()  # used: in lower case, since some disks do not tell A.wav from a.wav
    for number, line in enumerate(lines, 1):
        clip_id, _, text = line.partition("|")
        problem = ""
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}\|[^|]*", line):
            problem = "write ID|text, the ID with A-Z, a-z, 0-9, _, - and . (not first), up to 100"
        elif clip_id.lower() in used:
            problem = "use each ID once"
        elif not any(map(str.isalnum, text)) or not text.isprintable():
            problem = "the text cannot be spoken; write words and plain spaces, in UTF-8"
        if problem:
            raise UserError(f"{path}:{number}: {line[:60]!r}: {problem}")
        texts[clip_id] = text
        used.add(clip_id.lower())
    return texts


def draw_durations(n_clips: int, seed: int, scale: float) -> list[int]:
    """Samples of each clip: one from every ``1 / n_clips`` of the distribution, shuffled."""
    rng = random.Random(f"{seed} durations")
    shares = [(i + rng.random()) / n_clips for i in range(n_clips)]
    frames = np.interp(shares, DURATION_SHARES, DURATION_FRAMES)
    samples = [round(256 * n * scale) for n in frames.tolist()]
    rng.shuffle(samples)
    return samples


def find_voice(data: Path, voice: str) -> str:
    """The engine's name of ``voice``, which is a language or a file of one, such as de or en-gb,
    and perhaps + and a variant. Raises :class:`UserError` if the engine's ``data`` lacks either:
    the engine itself passes over a variant that it lacks."""
    base, plus, variant = voice.partition("+")
    files = sorted(path for path in data.glob("lang/**/*") if path.is_file())
    names = {}
    for path in files:
        for language in re.findall(r"^language\s+(\S+)", path.read_text("utf-8"), re.MULTILINE):
            names.setdefault(language.lower(), path.name)
    names |= {path.name.lower(): path.name.lower() for path in files}
    variants = [path.name for path in data.glob("voices/!v/*")]
    for part, known in ((base.lower(), [*names]), *([(variant, variants)] if plus else [])):
        if part not in known:
            near = ", ".join(difflib.get_close_matches(part, known, n=8, cutoff=0))
            raise UserError(f"--voice {voice}: has no '{part}'; use one like {near}")
    return names[base.lower()] + plus + variant


class Engine:
    """espeak-ng. What it has said changes what it says next."""

    def __init__(self, voice: str = VOICE) -> None:
        try:
            import espeakng_loader

            self._lib = ctypes.CDLL(espeakng_loader.get_library_path())
            data = espeakng_loader.get_data_path()
            # 2: AUDIO_OUTPUT_SYNCHRONOUS, in buffers of 500 ms; 0x8000: report errors, do not exit.
            rate = self._lib.espeak_Initialize(2, 500, os.fsencode(data), 0x8000)
            name = find_voice(Path(data), voice).encode()
            if rate != SAMPLING_RATE or self._lib.espeak_SetVoiceByName(name) != 0:
                raise RuntimeError(f"{data}: no voice {voice} here (150 characters at most)")
        except (ImportError, OSError, RuntimeError) as error:
            raise UserError(f"{error}; pip install --force-reinstall {ENGINE}") from None
        pointer = ctypes.c_void_p
        receiver = ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.c_int, pointer)
        self._callback = receiver(self._receive)  # kept, since the library calls it later
        self._lib.espeak_SetSynthCallback(self._callback)

    def _receive(self, samples: int | None, n_samples: int, events: int) -> int:
        if samples:
            self._buffers.append(ctypes.string_at(samples, 2 * n_samples))
        return 0  # go on

    def say(self, text: str, words_per_minute: int) -> np.ndarray:
        """Samples (n_samples,) int16 of ``text``, without the silence at either end."""
        self._buffers = []
        # The engine ignores double hyphens, but pauses at a dash.
        text = re.sub(r"\s*--+\s*", " – ", text).encode()
        size = ctypes.c_size_t(len(text) + 1)
        self._lib.espeak_SetParameter(1, words_per_minute, 0)  # 1: espeakRATE
        self._lib.espeak_Synth(text, size, 0, 1, 0, 1, None, None)  # last 1: UTF-8
        self._lib.espeak_Synchronize()
        samples = np.frombuffer(b"".join(self._buffers), dtype=np.int16)
        loud = np.flatnonzero(np.abs(samples.astype(int)) > SILENCE)
        return samples[loud[0] : loud[-1] + 1] if len(loud) else samples


def measure_pace(voice: str) -> float:
    """How long a voice takes to say something, over the time that the default one takes."""
    rng, engine = random.Random(0), Engine(voice)
    texts = [write(seconds, rng) for seconds in range(1, 9)]
    n_samples = sum(len(engine.say(text, WORDS_PER_MINUTE)) for text in texts)
    return n_samples / SAMPLING_RATE / sum(map(reading_seconds, texts))


def speak_to_length(
    engine: Engine, n_samples: int, rng: random.Random, pace: float
) -> tuple[str, np.ndarray]:
    """A text and its speech, which fills ``n_samples`` with padding."""
    least, usual, most = (round(seconds * SAMPLING_RATE) for seconds in PADDING)
    for _ in range(300):  # two or three will do, as a rule
        text, rate = write((n_samples - usual) / SAMPLING_RATE / pace, rng), WORDS_PER_MINUTE
        for _ in range(4):
            speech = engine.say(text, rate)
            if least <= n_samples - len(speech) <= most:
                return text, speech
            rate = round(rate * len(speech) / (n_samples - usual))
            if abs(rate - WORDS_PER_MINUTE) > 10:
                break
    seconds = f"{n_samples / SAMPLING_RATE:.1f} s"
    raise UserError(f"the voice finds no text of {seconds}; give --transcripts, or another --voice")


def make_chunk(
    wavs: Path, seed: int, voice: str, pace: float, chunk: list[tuple[str, int | str]]
) -> str:
    """Make the wavs of pairs of an ID and either samples or a text; their lines of metadata.csv."""
    engine, lines = Engine(voice), ""
    for clip_id, wanted in chunk:
        rng = random.Random(f"{seed} {clip_id}")
        if isinstance(wanted, int):
            n_samples = wanted
            text, speech = speak_to_length(engine, n_samples, rng, pace)
        else:
            text, speech = wanted, engine.say(wanted, WORDS_PER_MINUTE + rng.randint(-5, 5))
            if not len(speech):
                raise UserError(f"--transcripts: the text of '{clip_id}' has no sound; change it")
            least, usual, most = PADDING
            n_samples = len(speech) + round(rng.triangular(least, most, usual) * SAMPLING_RATE)
        # Faint noise everywhere: digital silence has no logarithm.
        samples = np.random.default_rng(rng.getrandbits(64)).integers(-2, 3, n_samples)
        start = (n_samples - len(speech)) // 2
        samples[start : start + len(speech)] += speech
        with wave.open(str(wavs / f"{clip_id}.wav"), "wb") as wav:
            wav.setparams((1, 2, SAMPLING_RATE, 0, "NONE", None))
            wav.writeframes(np.clip(samples, -32768, 32767).astype("<i2").tobytes())
        lines += f"{clip_id}|{text}|{text}\n"
    return lines


def follow_parent() -> None:
    """Leave Ctrl-C, which reaches every process, to the parent; end when it is killed."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait, daemon=True).start()


def make_clips(wavs: Path, clips: dict[str, int | str], args: argparse.Namespace) -> str:
    """Make all wavs, in several processes at a time; the content of metadata.csv."""
    context = multiprocessing.get_context("forkserver")

    def call(function: Callable, *arguments: object) -> object:
        # A new process each, for an engine that has said nothing yet.
        with ProcessPoolExecutor(1, context, initializer=follow_parent) as process:
            return process.submit(function, *arguments).result()

    # 1 for the default voice: its corpora are as they were before there were others.
    pace = call(measure_pace, args.voice) if args.voice != VOICE else 1.0
    make = partial(call, make_chunk, wavs, args.seed, args.voice, pace)
    items = list(clips.items())
    chunks = [items[i : i + CHUNK] for i in range(0, len(items), CHUNK)]
    with ThreadPoolExecutor(args.workers) as pool:
        made = pool.map(make, chunks)
        return "".join(progress_bar(made, total=len(chunks), unit="clip", unit_scale=CHUNK))


def make_corpus(args: argparse.Namespace) -> None:
    """Make the corpus that the arguments ask for, unless it is there already."""
    Engine(args.voice)  # refuses a missing one early
    folder, digest = args.output_dir, None
    if args.transcripts is None:
        lengths = draw_durations(args.clips, args.seed, args.duration_scale)
        clips = {f"DM{i // 250 + 1:03d}-{i % 250 + 1:04d}": n for i, n in enumerate(lengths)}
        n_samples = sum(lengths)
    else:
        clips = read_transcripts(args.transcripts)
        digest = hashlib.sha256(json.dumps(clips).encode()).hexdigest()
        n_samples = SAMPLING_RATE * sum(map(reading_seconds, clips.values()))
    record = {
        "version": 3,  # raise it when the same arguments give other bytes
        "engine": f"espeakng-loader {importlib.metadata.version('espeakng-loader')}",
        "clips": len(clips),
        "seed": args.seed,
        "duration_scale": args.duration_scale,
        "transcripts_sha256": digest,
    }
    record = json.dumps(record | ({"voice": args.voice} if args.voice != VOICE else {}))
    arguments, metadata, wavs = folder / "corpus.json", folder / "metadata.csv", folder / "wavs"
    names = {path.name for path in folder.glob("*")} - {"lock"}
    held = min(names, default=record)
    if arguments.exists():
        held = arguments.read_text(errors="replace").strip()
    if held != record:
        fix = "use another folder, or delete it"
        raise UserError(f"{folder}: holds {held[:300]}, not {record}; {fix}")
    finished = metadata.exists() and len(list(wavs.glob("*"))) == len(clips)
    if not finished:
        require_space(folder, 2 * n_samples, "choose another disk, or make fewer --clips")
        try:
            with locked(folder):
                arguments.write_text(record + "\n")
                metadata.unlink(missing_ok=True)
                wavs.mkdir(exist_ok=True)
                lines = make_clips(wavs, clips, args)
                with replacing(metadata) as file:
                    file.write(lines.encode())
                (folder / "lock").unlink()
        except BrokenProcessPool:
            fix = "run again, with fewer --workers if memory was short"
            raise UserError(f"{folder}: a worker process was killed; {fix}") from None
        except OSError as error:
            problem = f"{error.filename or folder}: {error.strerror}"
            raise UserError(f"{problem}; make room there, or use another folder") from None
    minutes = sum(path.stat().st_size for path in wavs.iterdir()) / (2 * SAMPLING_RATE * 60)
    done = "already there" if finished else "made"
    print(f"{folder}: {done}, {len(clips)} clips, {minutes:.1f} minutes")


def main(argv: list[str] | None = None) -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(description=__doc__, formatter_class=as_written)
    add = parser.add_argument
    add("output_dir", metavar="DIR", type=Path, help="folder for the corpus")
    add("--clips", type=positive, default=300, help="how many (default 300; LJSpeech has 13100)")
    add("--seed", type=int, default=0, help="another seed gives other texts (default 0)")
    times = "multiply LJSpeech's durations, 1.1 to 10.1 s, by 0.35 to 3.0 (default 1.0)"
    add("--duration_scale", type=float, default=1.0, metavar="X", help=times)
    add("--transcripts", type=Path, metavar="FILE", help="speak these ID|text lines instead")
    voice = "espeak-ng's, with a variant if you like, as de, en-gb or en-us+f3 (default en-us)"
    add("--voice", default=VOICE, help=voice)
    add("--workers", type=positive, default=os.cpu_count() or 1, help="processes (default: cores)")
    args = parser.parse_args(argv)
    if args.transcripts and (args.clips, args.duration_scale) != (300, 1.0):
        raise UserError("--transcripts: does not go with --clips or --duration_scale; leave it out")
    if not 0.35 <= args.duration_scale <= 3:  # one short word; half a minute
        raise UserError(f"--duration_scale {args.duration_scale}: use 0.35 to 3.0")
    make_corpus(args)


if __name__ == "__main__":
    exit_on_user_error(main)
