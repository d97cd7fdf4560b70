"""The tensor queue, a mapped file through which a rank publishes records and its pulse to other
processes."""
