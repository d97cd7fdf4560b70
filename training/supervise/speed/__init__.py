"""What tells why a run is slow: which limit, profiles and samples of its ranks."""
