"""LightningModules that the presets train."""
