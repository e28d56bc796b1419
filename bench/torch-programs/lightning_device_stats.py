"""Lightning with DeviceStatsMonitor, which logs all of torch.cuda.memory_stats() every step."""

import csv
import pathlib
import tempfile

import torch
from report import finish, mlp, needs, seed

with needs("lightning"):
    import lightning
    from lightning.pytorch.callbacks import DeviceStatsMonitor
    from lightning.pytorch.loggers import CSVLogger

seed()
losses = []


class Model(lightning.LightningModule):
    """A classifier of random data."""

    def __init__(self):
        super().__init__()
        self.model = mlp(device="cpu")

    def training_step(self, batch, _):
        data, target = batch
        loss = torch.nn.functional.cross_entropy(self.model(data), target)
        losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


dataset = torch.utils.data.TensorDataset(torch.randn(256, 256), torch.randint(0, 10, (256,)))
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        max_steps=20,
        accelerator="gpu",
        devices=1,
        callbacks=[DeviceStatsMonitor()],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(dataset, batch_size=32))
    with next(pathlib.Path(folder).rglob("metrics.csv")).open() as file:
        columns = sorted(next(csv.reader(file)))
stats = [column.split("/")[-1].removeprefix("on_train_batch_end.") for column in columns if "bytes" in column]
finish(losses, {"columns": len(columns), "statistics": sorted(set(stats))})
