"""Train on two processes, after pip install accelerate, from the root of this repository:

PYTHONPATH=. torchrun --standalone --nproc_per_node=2 examples/with_accelerate.py
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from batching import EpochBatchSampler  # in your project, a copy of batching.py

accelerator = Accelerator(cpu=True)
clips = [torch.ones(10 + 37 * i % 90, 4) for i in range(64)]
sampler = EpochBatchSampler([len(clip) for clip in clips], batch_size=4)
loader = DataLoader(list(enumerate(clips)), batch_sampler=sampler, collate_fn=lambda items: items)
model = torch.nn.Linear(4, 1)
# The loader is not prepared: the sampler already gives each process its own batches.
model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
epochs = []
for _ in range(2):
    seen = []
    for batch in loader:
        indices, mels = zip(*batch, strict=True)
        accelerator.backward(model(pad_sequence(mels).to(accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        seen += indices
    epochs.append(gather_object([seen]))  # of all processes
assert epochs[0] != epochs[1], "every epoch is the same"
for first, second in epochs:
    assert first != second and len({*first, *second}) == 64, "the processes do not share the clips"
accelerator.end_training()
os._exit(0)  # PyTorch's threads may still free tensors, and abort Python while it shuts down
