"""The presets that ltui ships, one YAML file each."""
