"""raftune: measure, learn and remember the fastest kernel dialect for every operator of a training graph."""
