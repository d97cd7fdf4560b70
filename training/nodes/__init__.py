"""Connection between the machines of a run: the head on node 0 and an agent on every other node.

The head has the run directory and its history. An agent starts and observes the ranks of its node,
and the head mirrors the files that it would read on its own. Training never waits for any of this.
"""
