"""The tensor queue: how a rank's records and its pulse cross to other processes through mapped
files."""
