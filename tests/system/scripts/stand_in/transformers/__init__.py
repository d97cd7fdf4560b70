"""A stand-in for Hugging Face's transformers: what ltui uses of its Trainer behaves the same."""
