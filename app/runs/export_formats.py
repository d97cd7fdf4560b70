"""The formats in which the metrics of runs can be written."""

EXPORT_FORMATS = {
    "csv": "a CSV table",
    "json": "a JSON table",
    "parquet": "a Parquet table",
    "tensorboard": "TensorBoard event files, in a folder",
}
"""Name and description of each."""
FOLDER_FORMAT = "tensorboard"
"""The format that is a folder with several files."""
PRINTED_FORMATS = ("csv", "json")
"""Formats that standard output can have."""
