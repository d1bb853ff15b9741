"""Train with Lightning: python examples/with_lightning.py"""

import lightning
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from batching import EpochBatchSampler  # a copy of batching.py beside this file

clips = [torch.randn(length, 4) for length in torch.randint(10, 100, (64,)).tolist()]
sampler = EpochBatchSampler([len(clip) for clip in clips], batch_size=4)
loader = DataLoader(list(enumerate(clips)), batch_sampler=sampler, collate_fn=lambda items: items)
model, seen = torch.nn.Linear(4, 1), ([], [])


class Module(lightning.LightningModule):
    def training_step(self, batch):
        indices, mels = zip(*batch, strict=True)
        seen[self.current_epoch].extend(indices)
        return model(pad_sequence(mels)).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(model.parameters())


# On several GPUs, the sampler gives each its own batches: Lightning must not deal them again.
trainer = lightning.Trainer(max_epochs=2, use_distributed_sampler=False, accelerator="cpu")
trainer.fit(Module(), loader)
assert seen[0] != seen[1], "every epoch is the same"
assert all(sorted(epoch) == list(range(64)) for epoch in seen), "a clip is missing"
