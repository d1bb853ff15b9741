"""Train with Lightning, after pip install lightning, from the root of this repository:

    PYTHONPATH=. python examples/with_lightning.py

Lightning must not distribute the batches over several GPUs: the sampler does.
"""

import lightning
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from batching import EpochBatchSampler  # in your project, a copy of batching.py

data = list(enumerate(torch.ones(10 + 37 * i % 90, 4) for i in range(64)))
sampler = EpochBatchSampler([len(clip) for _, clip in data], batch_size=6)
model, seen = torch.nn.Linear(4, 1), ([], [])


class Module(lightning.LightningModule):
    def train_dataloader(self):  # called in every epoch, whose number of batches may differ
        sampler.set_epoch(self.current_epoch)
        return DataLoader(data, batch_sampler=sampler, collate_fn=lambda items: items)

    def training_step(self, batch):
        seen[self.current_epoch].extend(i for i, _ in batch)
        return model(pad_sequence([clip for _, clip in batch])).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(model.parameters())


trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    reload_dataloaders_every_n_epochs=1,
    use_distributed_sampler=False,
    logger=False,
    enable_checkpointing=False,  # this example leaves no files
)
trainer.fit(Module())
assert seen[0] != seen[1] and set(seen[0]) == set(seen[1]) == set(range(64)), seen
