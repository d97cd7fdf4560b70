import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Line(LightningModule):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        # Not synchronised: ltui says so.
        self.log("val/error", torch.nn.functional.mse_loss(self.layer(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Points(LightningDataModule):
    def __init__(self, count, batch_size):
        super().__init__()
        x = torch.linspace(-1, 1, count).unsqueeze(1)
        self.points, self.batch_size = TensorDataset(x, 3 * x + 1), batch_size

    def train_dataloader(self):
        return DataLoader(self.points, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.points, self.batch_size)
