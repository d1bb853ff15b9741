"""Train with Hugging Face's Trainer, from the root of this repository:

    pip install transformers accelerate
    PYTHONPATH=. python examples/with_transformers.py

The Trainer needs equally many batches in every epoch: no dynamic batch sizes.
"""

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from batching import EpochBatchSampler  # in your project, a copy of batching.py

clips = [torch.randn(length, 4) for length in torch.randint(10, 100, (64,)).tolist()]
lengths, seen = [len(clip) for clip in clips], ([], [])
sampler = EpochBatchSampler(lengths, batch_size=4, dynamic_batch_size=False)


class Model(torch.nn.Linear):
    def forward(self, batch):
        indices, mels = zip(*batch, strict=True)
        seen[sampler.epoch].extend(indices)
        return {"loss": super().forward(pad_sequence(mels)).square().mean()}


class OurTrainer(Trainer):
    def get_train_dataloader(self):
        data = list(enumerate(clips))
        return DataLoader(data, batch_sampler=sampler, collate_fn=lambda x: {"batch": x})


arguments = TrainingArguments(num_train_epochs=2, use_cpu=True, save_strategy="no")
OurTrainer(Model(4, 1), arguments).train()
assert seen[0] != seen[1], "every epoch is the same"
assert all(sorted(epoch) == list(range(64)) for epoch in seen), "a clip is missing"
