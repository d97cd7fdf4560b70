"""LightningDataModules that the presets use."""
