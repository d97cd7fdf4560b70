"""LightningDataModules of the presets."""
