"""The paper's ten experiments, and what it reports and concludes of them.

The paper is Ge et al., "Speed up training with variable length inputs by efficient batching
strategies", Interspeech 2021.
"""

from typing import Any

# Table 2, in its order, after the batches of an epoch (Sec. 4). minutes: per epoch, on a GeForce
# GTX 1080. VL: smoothed validation loss at epochs 100, 160 and 220, and its average between the
# first and the last.
DIGITS = {"n_batches": 0, "zpr": 2, "abl": 2, "minutes": 2}
DIGITS |= {"vl1": 3, "vl2": 3, "vl3": 3, "vl_avg": 3}
PAPER = {
    name: dict(zip(DIGITS, values, strict=True))
    for name, *values in (
        ("RAND", 655, 32.02, 773.82, 32.82, 0.340, 0.323, 0.312, 0.325),
        ("SB-BR", 655, 0.16, 526.43, 20.82, 0.342, 0.327, 0.325, 0.329),
        ("SSB-BR", 655, 6.22, 556.22, 22.98, 0.356, 0.329, 0.318, 0.332),
        ("BKT-BR", 655, 6.10, 553.40, 22.70, 0.348, 0.327, 0.322, 0.331),
        ("ATS-BR", 655, 6.08, 552.48, 22.68, 0.355, 0.328, 0.316, 0.331),
        ("SB", 655, 0.16, 526.43, 21.67, 0.401, 0.391, 0.385, 0.388),
        ("SSB", 655, 6.22, 556.22, 23.06, 0.394, 0.373, 0.359, 0.378),
        ("SB-DBS", 419, 0.47, 527.15, 17.58, 0.367, 0.341, 0.330, 0.347),
        ("SSB-DBS", 449, 6.62, 557.68, 19.39, 0.346, 0.329, 0.326, 0.330),
        ("SSB-DBS-BR", 449, 6.62, 557.68, 19.28, 0.339, 0.320, 0.309, 0.322),
    )
}
EXPERIMENTS = tuple(PAPER)
MORE_EXPERIMENTS = ("RAND-DBS", "BKT-DBS-BR", "ATS-DBS-BR")  # which it does not have
PAPER_BATCHES = {name.removesuffix("-BR"): row["n_batches"] for name, row in PAPER.items()}
PAPER_BATCHES["RAND-DBS"] = 606
PAPER_REDUCTION = {"SSB-BR": 29.98, "SB-BR": 36.57, "SSB-DBS-BR": 41.25}  # Table 3, percent
PAPER_EPOCHS, PAPER_STAGES = 220, (100, 160, 220)  # of VL1, VL2 and VL3
PARAMETERS = {"SSB": "lrf", "BKT": "bucket_size", "ATS": "n_bins"}  # Table 1's selected parameters
PAPER_PARAMETERS = {"SSB": 0.1, "BKT": 1024, "ATS": 58}
COMPARISONS = {  # Table 4
    "SB or SSB": ("SB → SSB", "SB-BR → SSB-BR", "SB-DBS → SSB-DBS"),
    "without or with BR": ("SB → SB-BR", "SSB → SSB-BR", "SSB-DBS → SSB-DBS-BR"),
    "without or with DBS": ("SB → SB-DBS", "SSB → SSB-DBS", "SSB-BR → SSB-DBS-BR"),
}
MARGIN = 0.02  # losses this close are similar: the paper calls 0.318 and 0.322 so
SIMILAR = f"within ±{MARGIN:.0%}"
# Sec. 6: each conclusion, with {} for the verdict (and for the times), and which changes of loss it
# rests on. "(A → B) against (C → D)": how much more it changes from A to B than from C to D.
CONCLUSIONS = {
    "SSB-BR does as well as BKT-BR and ATS-BR: {}. Figure 2 (plot_batching.py) shows that LRF "
    "tunes the padding more smoothly.": {SIMILAR: ["BKT-BR → SSB-BR", "ATS-BR → SSB-BR"]},
    "SSB-BR, BKT-BR and ATS-BR are behind RAND after the same epochs, but can be ahead of it after "
    "the same time: {}. RAND in X's time: RAND's loss when X has finished.": {
        "higher": [f"RAND → {name}" for name in ("SSB-BR", "BKT-BR", "ATS-BR")],
        "lower": [f"RAND in {e}'s time → {e}" for e in ("SSB-BR", "BKT-BR", "ATS-BR")],
    },
    "SSB-DBS-BR is ahead of RAND after the same epochs: {}.{}": {"lower": ["RAND → SSB-DBS-BR"]},
    "SSB is better than SB; less so once DBS or BR is on: {}.": {
        "lower": ["SB → SSB", *(f"(SB → SSB) against (SB-{o} → SSB-{o})" for o in ("BR", "DBS"))]
    },
    "BR and DBS each lower the loss, most where batches are least random: {}.": {
        "lower": [
            *COMPARISONS["without or with BR"],
            *COMPARISONS["without or with DBS"],
            "(SB → SB-BR) against (SSB-DBS → SSB-DBS-BR)",
            "(SB → SB-DBS) against (SSB-BR → SSB-DBS-BR)",
        ]
    },
}

BATCHING = ("batching_strategy", "dynamic_batch_size", "batch_randomization")


def experiment_settings(name: str) -> dict[str, Any]:
    """The settings that make a run the experiment ``name``, such as "SSB-DBS-BR"."""
    strategy, *operations = name.split("-")
    return dict(zip(BATCHING, (strategy, "DBS" in operations, "BR" in operations), strict=True))


def experiment_name(settings: dict[str, Any]) -> str:
    """The paper's name of a run's batching; RAND-BR is RAND, whose batches are random already."""
    strategy, dynamic, randomized = (settings[name] for name in BATCHING)
    name = strategy + "-DBS" * dynamic + "-BR" * randomized
    return "RAND" if name == "RAND-BR" else name
