"""The dashboard in a browser (``ltui serve``)."""
