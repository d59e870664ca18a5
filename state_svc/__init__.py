"""The only client of Redis: what the mesh must not forget."""

import os

# Before numpy is imported, which is when OpenBLAS looks. Comparing a question with 100,000 vectors
# is bound by memory: one thread takes 13 ms. With one for each core they wait for each other: on a
# busy two-core machine 190 ms instead of 60, and 30 ms of processor time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
