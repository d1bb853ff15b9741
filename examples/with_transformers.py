"""Train with Hugging Face's Trainer, from the root of this repository:

    pip install transformers accelerate
    PYTHONPATH=. python examples/with_transformers.py

The Trainer needs equally many batches in every epoch: no dynamic batch sizes. It does not tell a
sampler which epoch a resumed training begins with: a callback does.
"""

import tempfile

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from batching import EpochBatchSampler  # in your project, a copy of batching.py

clips = [torch.randn(length, 4) for length in torch.randint(10, 100, (64,)).tolist()]
lengths = [len(clip) for clip in clips]


class Model(torch.nn.Linear):
    def forward(self, batch):
        indices, mels = zip(*batch, strict=True)
        seen.append(indices)
        return {"loss": super().forward(pad_sequence(mels)).square().mean()}


class OurTrainer(Trainer):
    def get_train_dataloader(self):
        data = list(enumerate(clips))
        return DataLoader(data, batch_sampler=sampler, collate_fn=lambda x: {"batch": x})


class SetEpoch(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **options):
        sampler.set_epoch(int(state.epoch))


def train(folder: str, n_epochs: int, resumed: bool = False) -> list[tuple]:
    """Returns the batches that were trained on."""
    seen.clear()
    arguments = TrainingArguments(
        folder, num_train_epochs=n_epochs, use_cpu=True, save_strategy="epoch", report_to=[]
    )
    trainer = OurTrainer(Model(4, 1), arguments, callbacks=[SetEpoch])
    trainer.train(resume_from_checkpoint=resumed)
    return [*seen]


seen, sampler = [], EpochBatchSampler(lengths, batch_size=4, dynamic_batch_size=False)
with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as broken:
    batches = train(whole, 3)
    assert train(broken, 1) + train(broken, 3, resumed=True) == batches, "resumed, it differs"
assert batches[:16] != batches[16:32], "every epoch is the same"
for n in (0, 16, 32):
    assert sorted(i for batch in batches[n : n + 16] for i in batch) == list(range(64)), "of each"
