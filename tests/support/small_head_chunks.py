"""A program for ranks: ``many_runs``, with the logits of at most 16 tokens at once."""

from hpc_tune.model import loss
from tests.support.many_runs import main

if __name__ == "__main__":
    loss.TRAINED_HEAD_LOGITS_BYTES, loss.MIN_CHUNK_TOKENS = 1, 16
    main()
